package handlertx

import (
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
)

// handlerRows are the rows of a handler's query.
type handlerRows struct {
	pgx.Rows
	g    *Guard
	last bool // the connection is free when they are closed: they are not a batch's
	shut bool
	late error // why they could not be read
}

// do runs a call that reads from the connection. closed says, after it, whether
// pgx has closed the rows.
func (r *handlerRows) do(call func() (closed bool, err error)) error {
	if r.late != nil {
		return r.late
	}
	if r.shut {
		_, err := call() // touches the rows alone
		return err
	}
	if err := r.g.enterOpen(); err != nil {
		r.late = err
		return err
	}
	closed, err := true, errPanicked
	defer func() {
		r.shut = closed
		r.g.leave(err, !(closed && r.last))
	}()
	closed, err = call()
	return err
}

func (r *handlerRows) Close() {
	_ = r.do(func() (bool, error) {
		r.Rows.Close()
		return true, r.Rows.Err()
	})
}

func (r *handlerRows) Next() (more bool) {
	_ = r.do(func() (bool, error) {
		if more = r.Rows.Next(); more {
			return false, nil
		}
		return true, r.Rows.Err()
	})
	return more
}

func (r *handlerRows) Scan(dest ...any) error {
	return r.do(func() (bool, error) {
		err := r.Rows.Scan(dest...)
		return err != nil, err // pgx closes them on an error
	})
}

func (r *handlerRows) Values() (values []any, err error) {
	err = r.do(func() (bool, error) {
		values, err = r.Rows.Values()
		return err != nil, err
	})
	return values, err
}

func (r *handlerRows) Err() error {
	if r.late != nil {
		return r.late
	}
	return r.Rows.Err()
}

func (r *handlerRows) Conn() *pgx.Conn {
	if r.g != nil {
		r.g.suspectIf(true)
	}
	return r.Rows.Conn()
}

// handlerRow is the row of a handler's QueryRow.
type handlerRow struct {
	pgx.Row
	g    *Guard
	last bool
}

func (r *handlerRow) Scan(dest ...any) error {
	if err := r.g.enterOpen(); err != nil {
		return err
	}
	err := errPanicked
	defer func() { r.g.leave(err, !r.last) }()
	err = r.Row.Scan(dest...)
	return err
}

// handlerBatch is the results of a handler's SendBatch.
type handlerBatch struct {
	pgx.BatchResults
	g    *Guard
	shut bool
	err  error // what Close said
}

func (b *handlerBatch) Exec() (tag pgconn.CommandTag, err error) {
	if err := b.g.enterOpen(); err != nil {
		return tag, err
	}
	tag, err = b.BatchResults.Exec()
	b.g.leave(err, !b.shut)
	return tag, err
}

func (b *handlerBatch) Query() (pgx.Rows, error) {
	if err := b.g.enterOpen(); err != nil {
		return failedRows(err), err
	}
	inner, err := b.BatchResults.Query()
	b.g.leave(err, !b.shut)
	return &handlerRows{Rows: inner, g: b.g, shut: err != nil}, err
}

func (b *handlerBatch) QueryRow() pgx.Row {
	if err := b.g.enterOpen(); err != nil {
		return failedRow{err}
	}
	inner := b.BatchResults.QueryRow()
	b.g.leave(nil, !b.shut)
	return &handlerRow{Row: inner, g: b.g}
}

// Close may run the batch's callbacks.
func (b *handlerBatch) Close() error {
	if b.shut {
		return b.err
	}
	if err := b.g.enterOpen(); err != nil {
		return err
	}
	b.err = errPanicked
	defer func() {
		b.shut = true
		b.g.leave(b.err, false)
	}()
	b.err = b.BatchResults.Close()
	return b.err
}

// failedRow is the row of a query that was refused.
type failedRow struct{ err error }

func (r failedRow) Scan(...any) error { return r.err }

// failedRows returns the rows of a query that was refused.
func failedRows(err error) pgx.Rows {
	return &handlerRows{Rows: noRows{}, late: err}
}

type noRows struct{}

func (noRows) Close()                                       {}
func (noRows) Err() error                                   { return nil }
func (noRows) CommandTag() pgconn.CommandTag                { return pgconn.CommandTag{} }
func (noRows) FieldDescriptions() []pgconn.FieldDescription { return nil }
func (noRows) Next() bool                                   { return false }
func (noRows) Scan(...any) error                            { return nil }
func (noRows) Values() ([]any, error)                       { return nil, nil }
func (noRows) RawValues() [][]byte                          { return nil }
func (noRows) Conn() *pgx.Conn                              { return nil }
func (noRows) TypeMap() *pgtype.Map                         { return nil }
