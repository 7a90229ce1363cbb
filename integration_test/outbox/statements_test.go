package outbox_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// constants returns the string constants of a package of the repository, by
// name; what is no text is left out.
func constants(t testing.TB, pkg string) map[string]string {
	t.Helper()
	dir := filepath.Join("..", "..", pkg)
	names, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	exprs := map[string]ast.Expr{}
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range file.Decls {
			gen, ok := d.(*ast.GenDecl)
			if !ok || gen.Tok != token.CONST {
				continue
			}
			for _, spec := range gen.Specs {
				v := spec.(*ast.ValueSpec)
				for i, name := range v.Names {
					if i < len(v.Values) {
						exprs[name.Name] = v.Values[i]
					}
				}
			}
		}
	}
	all := map[string]string{}
	for name, e := range exprs {
		if text, ok := evaluate(e, exprs); ok {
			all[name] = text
		}
	}
	return all
}

func evaluate(e ast.Expr, exprs map[string]ast.Expr) (string, bool) {
	switch e := e.(type) {
	case *ast.BasicLit:
		if e.Kind == token.STRING {
			text, err := strconv.Unquote(e.Value)
			return text, err == nil
		}
	case *ast.Ident:
		if of, ok := exprs[e.Name]; ok {
			return evaluate(of, exprs)
		}
	case *ast.ParenExpr:
		return evaluate(e.X, exprs)
	case *ast.BinaryExpr:
		x, okX := evaluate(e.X, exprs)
		y, okY := evaluate(e.Y, exprs)
		return x + y, okX && okY && e.Op == token.ADD
	}
	return "", false
}

// statement returns the SQL of a constant of package dispatcher.
func statement(t testing.TB, name string) string {
	t.Helper()
	sql, ok := constants(t, "dispatcher")[name]
	if !ok {
		t.Fatalf("package dispatcher has no constant %s", name)
	}
	return sql
}

var isSQL = regexp.MustCompile(`^\s*(SELECT|INSERT|UPDATE|DELETE|WITH)\s`)

// TestStatementsPrepare: the server takes every statement of the packages
// against the migrated schema, and knows the types of all parameters.
func TestStatementsPrepare(t *testing.T) {
	each(t, func(t *testing.T, s *server) {
		pool := connect(t, s.database(t))
		least := map[string]int{"dispatcher": 15, "outbox": 3, "inbox": 3}
		for pkg, want := range least {
			if _, err := os.Stat(filepath.Join("..", "..", pkg)); err != nil {
				t.Errorf("package %s: %v", pkg, err)
			}
			n := 0
			for name, sql := range constants(t, pkg) {
				if !isSQL.MatchString(sql) {
					continue
				}
				n++
				conn, err := pool.Acquire(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				_, err = conn.Conn().PgConn().Prepare(t.Context(), "", sql, nil)
				if err != nil {
					t.Errorf("%s.%s: %v", pkg, name, err)
				}
				conn.Release()
			}
			if n < want {
				t.Errorf("package %s has %d statements in constants, want at least %d", pkg, n, want)
			}
		}
	})
}
