-- The outbox: messages, lanes and who owns them, cursors, scheduled and parked
-- messages.
-- "postroom" is the schema; another name replaces it where it stands in double
-- quotes, see the comment of package migrations.

-- A database of one cluster. Snapshots and transaction ids mean something only
-- there, so every row that holds one says where it was written. The value is
-- kept in a session setting, since a column default asks for it once per row.
-- A server that refuses pg_control_system is told by database name and oid
-- alone: see "Restoring a dump" in the operating notes.
CREATE FUNCTION "postroom".origin() RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL RESTRICTED AS $$
DECLARE
    known text := current_setting('postroom.origin', true);
    here  bigint;
BEGIN
    IF known <> '' THEN
        RETURN known::bigint;
    END IF;
    BEGIN
        SELECT c.system_identifier # d.oid::bigint INTO STRICT here
          FROM pg_catalog.pg_control_system() c, pg_catalog.pg_database d
         WHERE d.datname = pg_catalog.current_database();
    EXCEPTION WHEN insufficient_privilege THEN
        SELECT pg_catalog.hashtextextended(d.datname::text, d.oid::bigint) INTO STRICT here
          FROM pg_catalog.pg_database d
         WHERE d.datname = pg_catalog.current_database();
    END;
    PERFORM pg_catalog.set_config('postroom.origin', here::text, false);
    RETURN here;
END
$$;

-- Identifiers must come from a sequence without cache: rows of one key get
-- theirs in the order in which their writers held the key's row.
CREATE SEQUENCE "postroom".outbox_messages_id_seq CACHE 1;

CREATE TABLE "postroom".outbox_messages (
    origin        bigint      NOT NULL DEFAULT "postroom".origin(),
    id            bigint      NOT NULL DEFAULT nextval('"postroom".outbox_messages_id_seq'),
    xid           xid8        NOT NULL DEFAULT pg_current_xact_id(),
    created_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    hash          integer     NOT NULL CHECK (hash >= 0),
    generation    smallint    NOT NULL DEFAULT 1,
    lanes         smallint    NOT NULL DEFAULT 4,
    lane          integer     NOT NULL GENERATED ALWAYS AS (generation * 1000 + hash % lanes) STORED,
    message_id    text        NOT NULL CHECK (message_id <> ''),
    topic         text        NOT NULL CHECK (topic <> ''),
    key           text,
    payload       bytea,
    header_names  text[]      NOT NULL DEFAULT '{}',
    header_values bytea[]     NOT NULL DEFAULT '{}',
    operation     text,
    PRIMARY KEY (lane, origin, id),
    CHECK (cardinality(header_names) = cardinality(header_values))
);
ALTER SEQUENCE "postroom".outbox_messages_id_seq OWNED BY "postroom".outbox_messages.id;
CREATE INDEX outbox_messages_xid ON "postroom".outbox_messages (lane, origin, xid, id);

-- The generations of lanes. A message belongs to the one that the columns'
-- defaults named when it was written. former is a snapshot that had seen all
-- that was ever written to the generation before.
CREATE TABLE "postroom".outbox_generations (
    generation smallint    PRIMARY KEY CHECK (generation > 0),
    lanes      smallint    NOT NULL CHECK (lanes BETWEEN 1 AND 256),
    origin     bigint,
    former     pg_snapshot,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    CHECK ((generation = 1) = (former IS NULL) AND (former IS NULL) = (origin IS NULL))
);
INSERT INTO "postroom".outbox_generations (generation, lanes) VALUES (1, 4);

-- One row per lane: which dispatcher owns it, under which fence, until when. A
-- lane of a former generation is drained for good once all of it is settled; its
-- row stays as long as its messages are kept. starts counts the owners in a row
-- that did not release the lane and of whom no call of the publisher returned;
-- suspect says that one message is being published alone.
CREATE TABLE "postroom".outbox_lanes (
    lane       integer     PRIMARY KEY,
    generation smallint    NOT NULL,
    fence      bigint      NOT NULL DEFAULT 0 CHECK (fence >= 0),
    owner      text        CHECK (owner <> ''),
    lease      timestamptz,
    starts     smallint    NOT NULL DEFAULT 0 CHECK (starts >= 0),
    suspect    boolean     NOT NULL DEFAULT false,
    drained_at timestamptz CHECK (drained_at IS NULL OR owner IS NULL),
    CHECK ((owner IS NULL) = (lease IS NULL)),
    CHECK (lane / 1000 = generation)
) WITH (fillfactor = 50);
INSERT INTO "postroom".outbox_lanes (lane, generation)
SELECT 1000 + n, 1 FROM generate_series(0, 3) n;

-- The dispatchers that are there to own lanes, each until its lease ends. The
-- earlier ones have the larger share where lanes do not divide evenly.
CREATE TABLE "postroom".outbox_dispatchers (
    owner       text        PRIMARY KEY CHECK (owner <> ''),
    joined_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    lease       timestamptz NOT NULL,
    wants       integer     NOT NULL DEFAULT 0 CHECK (wants >= 0),
    wants_until timestamptz NOT NULL DEFAULT '-infinity'
) WITH (fillfactor = 50);

-- How far a lane has been published: everything before prev is settled, what
-- lies between prev and until is being published and is settled up to last_id.
-- Rows are appended and never updated.
CREATE TABLE "postroom".outbox_cursors (
    lane       integer     NOT NULL,
    origin     bigint      NOT NULL,
    number     bigint      NOT NULL CHECK (number > 0),
    fence      bigint      NOT NULL,
    owner      text        NOT NULL,
    prev       pg_snapshot NOT NULL,
    until      pg_snapshot NOT NULL,
    last_id    bigint      NOT NULL CHECK (last_id >= 0),
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (lane, origin, number)
);
CREATE INDEX outbox_cursors_time ON "postroom".outbox_cursors (lane, origin, created_at, number);

-- Messages for later. They enter outbox_messages when they are due.
CREATE TABLE "postroom".outbox_scheduled (
    id            bigint      GENERATED ALWAYS AS IDENTITY,
    deliver_at    timestamptz NOT NULL,
    created_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    hash          integer     NOT NULL CHECK (hash >= 0),
    message_id    text        NOT NULL CHECK (message_id <> ''),
    topic         text        NOT NULL CHECK (topic <> ''),
    key           text,
    payload       bytea,
    header_names  text[]      NOT NULL DEFAULT '{}',
    header_values bytea[]     NOT NULL DEFAULT '{}',
    operation     text,
    PRIMARY KEY (deliver_at, id),
    CHECK (cardinality(header_names) = cardinality(header_values))
);
CREATE INDEX outbox_scheduled_message ON "postroom".outbox_scheduled (message_id);

-- Messages set aside: refused by the broker, or waiting behind one of their
-- topic and key that was. They leave in the order of (lane, origin, id).
CREATE TABLE "postroom".outbox_parked (
    lane          integer     NOT NULL,
    origin        bigint      NOT NULL,
    id            bigint      NOT NULL,
    state         text        NOT NULL CHECK (state IN ('refused', 'waiting')),
    attempts      integer     NOT NULL CHECK (attempts >= 0),
    error         text        CHECK (length(error) <= 1000),
    parked_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    created_at    timestamptz NOT NULL,
    hash          integer     NOT NULL,
    message_id    text        NOT NULL,
    topic         text        NOT NULL,
    key           text,
    payload       bytea,
    header_names  text[]      NOT NULL,
    header_values bytea[]     NOT NULL,
    operation     text,
    PRIMARY KEY (lane, origin, id),
    CHECK (state <> 'refused' OR (error IS NOT NULL AND attempts > 0)),
    CHECK (state <> 'waiting' OR (key IS NOT NULL AND error IS NULL AND attempts = 0))
);
CREATE INDEX outbox_parked_key ON "postroom".outbox_parked (lane, topic, key, origin, id) WHERE key IS NOT NULL;
CREATE INDEX outbox_parked_refused ON "postroom".outbox_parked (parked_at) WHERE state = 'refused';
