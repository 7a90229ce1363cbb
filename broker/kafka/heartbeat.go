package kafka

import (
	"encoding/binary"
	"fmt"
	"io"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol"
)

// A heartbeat says to the group's coordinator that a member lives. It is encoded
// here, as version 0, since the client (0.4.51) reads the fields of later answers in
// the wrong order: a member would never hear that its group is divided anew.
type heartbeat struct {
	group, member string
	generation    int32
	client        string
}

// A heartbeatAnswer is the coordinator's error code.
type heartbeatAnswer kafkago.Error

var (
	_ protocol.GroupMessage = (*heartbeat)(nil) // which has it sent to the coordinator
	_ protocol.RawExchanger = (*heartbeat)(nil)
)

func (*heartbeat) ApiKey() protocol.ApiKey                 { return protocol.Heartbeat }
func (heartbeatAnswer) ApiKey() protocol.ApiKey            { return protocol.Heartbeat }
func (h *heartbeat) Group() string                         { return h.group }
func (*heartbeat) Required(map[protocol.ApiKey]int16) bool { return true }

// heartbeatID is the number by which the answer names the request. A connection has
// one request at a time.
const heartbeatID = 0x706f7374

// RawExchange implements [protocol.RawExchanger].
func (h *heartbeat) RawExchange(rw io.ReadWriter) (protocol.Message, error) {
	req := make([]byte, 4, 64)
	req = binary.BigEndian.AppendUint16(req, uint16(protocol.Heartbeat))
	req = binary.BigEndian.AppendUint16(req, 0)
	req = binary.BigEndian.AppendUint32(req, heartbeatID)
	req = appendString(req, h.client)
	req = appendString(req, h.group)
	req = binary.BigEndian.AppendUint32(req, uint32(h.generation))
	req = appendString(req, h.member)
	binary.BigEndian.PutUint32(req, uint32(len(req)-4))
	if _, err := rw.Write(req); err != nil {
		return nil, err
	}
	var res [4 + 4 + 2]byte // size, id, error code
	if _, err := io.ReadFull(rw, res[:]); err != nil {
		return nil, err
	}
	if size, id := binary.BigEndian.Uint32(res[:]), binary.BigEndian.Uint32(res[4:]); size != 6 || id != heartbeatID {
		return nil, fmt.Errorf("a heartbeat is answered with %d bytes, to request %#x", size, id)
	}
	return heartbeatAnswer(int16(binary.BigEndian.Uint16(res[8:]))), nil
}

func appendString(b []byte, s string) []byte {
	return append(binary.BigEndian.AppendUint16(b, uint16(len(s))), s...)
}
