package throwaway

import (
	"errors"
	"fmt"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"syscall"
)

// An owner is the user as whom servers run. The zero value is the user who runs
// this program.
type owner struct {
	credential *syscall.Credential
}

// serverOwner returns an unprivileged user where this program runs as root:
// PostgreSQL and PgBouncer refuse root.
func serverOwner() (owner, error) {
	if os.Geteuid() != 0 {
		return owner{}, nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, uidErr := strconv.ParseUint(u.Uid, 10, 32)
		gid, gidErr := strconv.ParseUint(u.Gid, 10, 32)
		if uidErr == nil && gidErr == nil && uid != 0 {
			return owner{&syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}}, nil
		}
	}
	return owner{}, errors.New("this program runs as root, which PostgreSQL refuses, " +
		"and there is no user postgres or nobody to run it as: run as an ordinary user or add one of them")
}

// tempDir makes a directory that belongs to the owner and that no other user
// can read.
func (o owner) tempDir(name string) (string, error) {
	parent := os.TempDir()
	if !o.reaches(parent) {
		parent = "/tmp"
	}
	dir, err := os.MkdirTemp(parent, "postroom-"+name+"-")
	if err != nil {
		return "", err
	}
	if err := o.own(dir); err != nil {
		return "", errors.Join(err, os.RemoveAll(dir))
	}
	return dir, nil
}

// own hands a file of this user to the owner.
func (o owner) own(path string) error {
	if o.credential == nil {
		return nil
	}
	return os.Lchown(path, int(o.credential.Uid), int(o.credential.Gid))
}

// reaches reports whether an owner who is not this user can enter dir.
func (o owner) reaches(dir string) bool {
	if o.credential == nil {
		return true
	}
	dir, err := filepath.Abs(dir)
	if err == nil {
		dir, err = filepath.EvalSymlinks(dir)
	}
	for err == nil {
		var info os.FileInfo
		if info, err = os.Stat(dir); err == nil && info.Mode()&0o001 == 0 {
			return false
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			break
		}
		dir = parent
	}
	return err == nil
}

// cacheDir returns the directory for downloads that are kept between runs. What
// is in it can be read by everyone, since servers may run as another user.
func cacheDir() (string, error) {
	base := "/var/cache"
	if os.Geteuid() != 0 {
		var err error
		if base, err = os.UserCacheDir(); err != nil {
			return "", fmt.Errorf("find a directory for downloads: %w: set HOME or XDG_CACHE_HOME", err)
		}
	}
	dir := filepath.Join(base, "postroom-throwaway")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", fmt.Errorf("make a directory for downloads: %w", err)
	}
	return dir, nil
}
