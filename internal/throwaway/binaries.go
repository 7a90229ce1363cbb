package throwaway

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"

	embeddedpostgres "github.com/fergusstrange/embedded-postgres"
)

const oldestMajor = 14

// fetchable names the releases that can be downloaded, by major version.
var fetchable = map[int]embeddedpostgres.PostgresVersion{
	14: embeddedpostgres.V14,
	15: embeddedpostgres.V15,
	16: embeddedpostgres.V16,
	17: embeddedpostgres.V17,
	18: embeddedpostgres.V18,
}

const newestFetchable = 18

// installedPlaces are where packages put the server without linking it on PATH.
var installedPlaces = []string{
	"/usr/lib/postgresql/*/bin",                 // Debian
	"/usr/pgsql-*/bin",                          // PGDG on Red Hat
	"/opt/homebrew/opt/postgresql@*/bin",        // Homebrew, Apple silicon
	"/usr/local/opt/postgresql@*/bin",           // Homebrew, Intel
	"/home/linuxbrew/.linuxbrew/opt/*sql@*/bin", // Homebrew, Linux
}

// binaries are one installation of the server.
type binaries struct {
	dir     string
	version string // "15.18"
	major   int
	source  string
}

// findBinaries returns the newest installation of major, or of any version that
// Postroom supports where major is 0. Where none is installed it fetches one.
func findBinaries(ctx context.Context, o owner, major int) (binaries, error) {
	var found []binaries
	for _, dir := range installedDirs() {
		b, err := inspect(ctx, dir)
		if err != nil || b.major < oldestMajor || major != 0 && b.major != major || !o.reaches(dir) {
			continue
		}
		b.source = fmt.Sprintf("PostgreSQL %s from %s", b.version, dir)
		found = append(found, b)
	}
	if len(found) > 0 {
		return slices.MaxFunc(found, func(a, b binaries) int { return cmp.Compare(a.major, b.major) }), nil
	}
	cache, err := cacheDir()
	if err != nil {
		return binaries{}, err
	}
	b, err := fetch(ctx, cache, cmp.Or(major, newestFetchable))
	if err != nil {
		return b, fmt.Errorf("no PostgreSQL %s is installed, and none could be fetched: %w: "+
			"install it, or give the URL of a running server", wanted(major), err)
	}
	return b, nil
}

func wanted(major int) string {
	if major == 0 {
		return fmt.Sprintf("%d or later", oldestMajor)
	}
	return strconv.Itoa(major)
}

func installedDirs() []string {
	var dirs []string
	if p, err := exec.LookPath("postgres"); err == nil {
		if p, err = filepath.EvalSymlinks(p); err == nil {
			dirs = append(dirs, filepath.Dir(p))
		}
	}
	for _, pattern := range installedPlaces {
		matches, err := filepath.Glob(pattern)
		if err != nil {
			panic(err) // a malformed pattern above
		}
		dirs = append(dirs, matches...)
	}
	return dirs
}

var versionText = regexp.MustCompile(`\(PostgreSQL\) ((\d+)[.\w]*)`)

// inspect asks the server program in dir for its version.
func inspect(ctx context.Context, dir string) (binaries, error) {
	if _, err := os.Stat(filepath.Join(dir, "initdb")); err != nil {
		return binaries{}, err
	}
	out, err := exec.CommandContext(ctx, filepath.Join(dir, "postgres"), "--version").Output()
	if err != nil {
		return binaries{}, fmt.Errorf("%s/postgres --version: %w", dir, err)
	}
	m := versionText.FindStringSubmatch(string(out))
	if m == nil {
		return binaries{}, fmt.Errorf("%s/postgres --version says %q", dir, out)
	}
	major, err := strconv.Atoi(m[2])
	return binaries{dir: dir, version: m[1], major: major}, err
}

// fetch downloads a release, or takes it from the cache of earlier runs. Of
// several processes that want one at once, the first downloads it.
func fetch(ctx context.Context, cache string, major int) (binaries, error) {
	version, ok := fetchable[major]
	if !ok {
		return binaries{}, fmt.Errorf("version %d is none of those that can be fetched, %d to %d", major, oldestMajor, newestFetchable)
	}
	unlock, err := lock(ctx, filepath.Join(cache, "lock"))
	if err != nil {
		return binaries{}, err
	}
	defer unlock()
	home := filepath.Join(cache, "postgresql-"+string(version))
	if _, err := os.Stat(home); errors.Is(err, fs.ErrNotExist) {
		if err := download(cache, home, version); err != nil {
			return binaries{}, err
		}
	}
	b, err := inspect(ctx, filepath.Join(home, "bin"))
	if err != nil {
		return b, fmt.Errorf("%w: remove %s to fetch it anew", err, home)
	}
	b.source = fmt.Sprintf("PostgreSQL %s, fetched, from %s", b.version, b.dir)
	return b, nil
}

// download has the library fetch, check and unpack a release, and puts it at
// home in one step. The library can do this only as the beginning of a start,
// and starts nothing as root. So it is given a data directory that it takes for
// an existing one and cannot start; that failure, and no other, is the expected
// end.
func download(cache, home string, version embeddedpostgres.PostgresVersion) (err error) {
	work, err := os.MkdirTemp(cache, "fetch-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(work)) }()

	major, _, _ := strings.Cut(string(version), ".")
	data := filepath.Join(work, "data")
	if err := os.Mkdir(data, 0o700); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(data, "PG_VERSION"), []byte(major+"\n"), 0o600); err != nil {
		return err
	}
	unpacked := filepath.Join(work, "unpacked")
	server := embeddedpostgres.NewDatabase(embeddedpostgres.DefaultConfig().
		Version(version).
		Port(0).
		CachePath(filepath.Join(work, "archive")).
		RuntimePath(filepath.Join(work, "runtime")).
		BinariesPath(unpacked).
		DataPath(data).
		Logger(nil))
	const expected = "could not start postgres"
	switch err := server.Start(); {
	case err == nil:
		return errors.Join(errors.New("a data directory that holds nothing was started"), server.Stop())
	case !strings.HasPrefix(err.Error(), expected):
		return fmt.Errorf("fetch PostgreSQL %s: %w", version, err)
	}
	if err := makeReadable(unpacked); err != nil {
		return err
	}
	return os.Rename(unpacked, home)
}

// makeReadable lets every user read, and run what is a program.
func makeReadable(root string) error {
	return filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.Type()&fs.ModeSymlink != 0 {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		mode := info.Mode().Perm() | 0o444
		if d.IsDir() || mode&0o100 != 0 {
			mode |= 0o111
		}
		return os.Chmod(path, mode)
	})
}

// lock waits until no other process holds the file's lock. The lock ends with
// the call of the function that is returned, or with this process.
func lock(ctx context.Context, path string) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	err = poll(ctx, "the lock "+path, func() (bool, error) {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if errors.Is(err, syscall.EWOULDBLOCK) || errors.Is(err, syscall.EINTR) {
			return false, nil
		}
		return err == nil, err
	})
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return func() { _ = f.Close() }, nil // which also unlocks
}
