package postroom

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"time"
)

// NewID returns a new UUID of version 7 (RFC 9562): unique, and ordered by the
// time of the call to about a quarter of a microsecond, so that the rows it
// keys are written where the last ones were.
func NewID() string {
	var u [16]byte
	_, _ = rand.Read(u[6:]) // never fails, see crypto/rand
	now := time.Now()
	ms := uint64(now.UnixMilli())
	binary.BigEndian.PutUint16(u[0:], uint16(ms>>32))
	binary.BigEndian.PutUint32(u[2:], uint32(ms))
	// The fraction of the millisecond in 12 bits (RFC 9562, section 6.2, method 3).
	frac := uint64(now.Nanosecond()%int(time.Millisecond)) << 12 / uint64(time.Millisecond)
	binary.BigEndian.PutUint16(u[6:], uint16(frac))
	return formatUUID(u, 7)
}

// derive forms a UUID of version 8 from parts, which are hashed with their
// lengths so that no two lists of parts give the same input. It keeps the time
// bits of parent where that is a time-ordered UUID.
func derive(parent string, parts ...string) string {
	h := sha256.New()
	var n [8]byte
	for _, p := range parts {
		binary.BigEndian.PutUint64(n[:], uint64(len(p)))
		h.Write(n[:])
		h.Write([]byte(p))
	}
	var u [16]byte
	copy(u[:], h.Sum(nil))
	if p, ok := timeBits(parent); ok {
		copy(u[:6], p[:])
	}
	return formatUUID(u, 8)
}

// timeBits returns the leading 48 bits of a UUID of version 7 or 8 that read as
// milliseconds of the years 2000 to 2100.
func timeBits(id string) (bits [6]byte, ok bool) {
	if len(id) != 36 || id[8] != '-' || id[13] != '-' || (id[14] != '7' && id[14] != '8') {
		return bits, false
	}
	if _, err := hex.Decode(bits[:4], []byte(id[:8])); err != nil {
		return bits, false
	}
	if _, err := hex.Decode(bits[4:], []byte(id[9:13])); err != nil {
		return bits, false
	}
	ms := int64(binary.BigEndian.Uint16(bits[:2]))<<32 | int64(binary.BigEndian.Uint32(bits[2:]))
	year := time.UnixMilli(ms).UTC().Year()
	return bits, year >= 2000 && year < 2100
}

// formatUUID sets version and variant and writes u in the usual form.
func formatUUID(u [16]byte, version byte) string {
	u[6] = u[6]&0x0f | version<<4
	u[8] = u[8]&0x3f | 0x80
	var s [36]byte
	hex.Encode(s[0:], u[0:4])
	hex.Encode(s[9:], u[4:6])
	hex.Encode(s[14:], u[6:8])
	hex.Encode(s[19:], u[8:10])
	hex.Encode(s[24:], u[10:])
	s[8], s[13], s[18], s[23] = '-', '-', '-', '-'
	return string(s[:])
}
