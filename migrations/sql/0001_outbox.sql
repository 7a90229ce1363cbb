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

-- The dispatchers that are there to own lanes, each until its lease ends, and
-- what was wrong there when they last said so. The earlier ones have the larger
-- share where lanes do not divide evenly.
CREATE TABLE "postroom".outbox_dispatchers (
    owner       text        PRIMARY KEY CHECK (owner <> ''),
    joined_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    lease       timestamptz NOT NULL,
    wants       integer     NOT NULL DEFAULT 0 CHECK (wants >= 0),
    wants_until timestamptz NOT NULL DEFAULT '-infinity',
    troubles    text[]      NOT NULL DEFAULT '{}'
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

-- Messages set aside. Those of one lane, topic and key leave in the order of
-- number, before any that still stands in outbox_messages. A row is
--   refused    by the broker: the first of its key. It is tried when due_at has
--              come; without due_at an operator decides.
--   waiting    behind a refused one of its key, or for what away names, a topic
--              or a part of one that cannot be reached. All rows of a key agree.
--   discarded  or sent elsewhere by an operator: an empty place, which keeps the
--              key's order until the lane's owner takes it out.
-- due_at stands only at the first row of a key, or at one without a key.
CREATE TABLE "postroom".outbox_parked (
    number        bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    lane          integer     NOT NULL,
    origin        bigint      NOT NULL,
    id            bigint      NOT NULL,
    state         text        NOT NULL CHECK (state IN ('refused', 'waiting', 'discarded')),
    away          text        CHECK (away <> ''),
    due_at        timestamptz,
    attempts      integer     NOT NULL DEFAULT 0 CHECK (attempts >= 0),
    error         text        CHECK (length(error) <= 1000),
    tried_at      timestamptz,
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
    CHECK (away IS NULL OR (state <> 'refused' AND due_at IS NULL)),
    CHECK (state <> 'refused' OR error IS NOT NULL),
    CHECK (state <> 'waiting' OR (error IS NULL AND attempts = 0)),
    CHECK (state <> 'waiting' OR key IS NOT NULL OR away IS NOT NULL)
);
CREATE INDEX outbox_parked_key ON "postroom".outbox_parked (lane, topic, key, number);
CREATE INDEX outbox_parked_due ON "postroom".outbox_parked (lane, due_at) WHERE due_at IS NOT NULL;
CREATE INDEX outbox_parked_away ON "postroom".outbox_parked (lane, away, number) WHERE away IS NOT NULL;
CREATE INDEX outbox_parked_refused ON "postroom".outbox_parked (number) WHERE state = 'refused';

-- What operators did with parked messages. A message that was discarded is
-- here as it was. Nothing cleans this table.
CREATE TABLE "postroom".outbox_parked_history (
    number        bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at            timestamptz NOT NULL DEFAULT clock_timestamp(),
    who           text        NOT NULL,
    action        text        NOT NULL CHECK (action IN ('requeue', 'discard', 'redirect')),
    reason        text,
    target        text        CHECK ((action = 'redirect') = (target IS NOT NULL)),
    parked        bigint      NOT NULL,
    state         text        NOT NULL,
    attempts      integer     NOT NULL,
    error         text,
    parked_at     timestamptz NOT NULL,
    created_at    timestamptz NOT NULL,
    message_id    text        NOT NULL,
    topic         text        NOT NULL,
    key           text,
    payload       bytea,
    header_names  text[]      NOT NULL DEFAULT '{}',
    header_values bytea[]     NOT NULL DEFAULT '{}',
    operation     text
);
CREATE INDEX outbox_parked_history_message ON "postroom".outbox_parked_history (message_id);

-- The number from which a keyed message's lane follows: what package outbox
-- computes when it writes.
CREATE FUNCTION "postroom".lane_hash(topic text, key text) RETURNS integer
LANGUAGE plpgsql IMMUTABLE STRICT SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    bytes bytea  := convert_to(topic, 'UTF8') || '\x00'::bytea || convert_to(key, 'UTF8');
    h     bigint := 2166136261;
BEGIN
    FOR i IN 0 .. length(bytes) - 1 LOOP
        h := ((h # get_byte(bytes, i)) * 16777619) & 4294967295;
    END LOOP;
    h := ((h # (h >> 16)) * 73244475) & 4294967295;
    RETURN (h # (h >> 16)) & 2147483647;
END
$$;

-- change_parked does what the three functions below say. It works through the
-- rows in their order, at most as many as asked for, from behind a number.
CREATE FUNCTION "postroom".change_parked(
    action text, target text, topic text, key text, message_id text, error text, older_than interval,
    everything boolean, who text, reason text, after bigint, most integer,
    OUT messages bigint, OUT last bigint)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_custom_plan AS $a_tag_that_is_longer_than_a_schema_name_can_be_so_that_none_holds_it$
#variable_conflict use_column
BEGIN
    IF num_nonnulls(change_parked.topic, change_parked.key, change_parked.message_id, change_parked.error,
                    change_parked.older_than) = 0 AND NOT coalesce(everything, false) THEN
        RAISE EXCEPTION 'which parked messages? Give topic, key, message_id, error or older_than, or everything => true'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF action = 'redirect' AND coalesce(change_parked.target, '') = '' THEN
        RAISE EXCEPTION 'to which topic? Give target' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    WITH chosen AS MATERIALIZED (
        SELECT p.*
          FROM "postroom".outbox_parked p
         WHERE p.number > after
           AND (p.state = 'refused' OR action <> 'requeue' AND p.state = 'waiting')
           AND (change_parked.topic IS NULL OR p.topic = change_parked.topic)
           AND (change_parked.key IS NULL OR p.key = change_parked.key)
           AND (change_parked.message_id IS NULL OR p.message_id = change_parked.message_id)
           AND (change_parked.error IS NULL OR strpos(p.error, change_parked.error) > 0)
           AND (older_than IS NULL OR p.parked_at < clock_timestamp() - older_than)
           AND (action <> 'redirect' OR p.topic <> change_parked.target)
         ORDER BY p.number LIMIT most FOR UPDATE
    ), noted AS (
        INSERT INTO "postroom".outbox_parked_history (who, action, reason, target, parked, state, attempts, error,
               parked_at, created_at, message_id, topic, key, payload, header_names, header_values, operation)
        SELECT coalesce(change_parked.who, session_user), change_parked.action, change_parked.reason, change_parked.target,
               c.number, c.state, c.attempts, c.error, c.parked_at, c.created_at, c.message_id, c.topic, c.key,
               CASE WHEN change_parked.action = 'discard' THEN c.payload END,
               CASE WHEN change_parked.action = 'discard' THEN c.header_names ELSE '{}' END,
               CASE WHEN change_parked.action = 'discard' THEN c.header_values ELSE '{}' END,
               c.operation
          FROM chosen c ORDER BY c.number
    ), requeued AS (
        UPDATE "postroom".outbox_parked p SET attempts = 0, due_at = clock_timestamp()
          FROM chosen c WHERE p.number = c.number AND change_parked.action = 'requeue'
    ), sent AS (
        INSERT INTO "postroom".outbox_messages
               (created_at, hash, message_id, topic, key, payload, header_names, header_values, operation)
        SELECT c.created_at, coalesce("postroom".lane_hash(change_parked.target, c.key), c.hash), c.message_id,
               change_parked.target, c.key, c.payload, c.header_names, c.header_values, c.operation
          FROM chosen c WHERE change_parked.action = 'redirect' ORDER BY c.number
    ), emptied AS (
        UPDATE "postroom".outbox_parked p
           SET state = 'discarded', payload = NULL, header_names = '{}', header_values = '{}',
               due_at = CASE WHEN p.state = 'refused' THEN clock_timestamp() ELSE p.due_at END
          FROM chosen c WHERE p.number = c.number AND change_parked.action <> 'requeue'
    )
    SELECT count(*), coalesce(max(c.number), after) INTO messages, last FROM chosen c;
END
$a_tag_that_is_longer_than_a_schema_name_can_be_so_that_none_holds_it$;

-- requeue_parked has the dispatcher try refused messages at once, with their
-- attempts counted anew. What waits behind them follows in order. Like the two
-- below it returns how many messages it took, the first ones of those that
-- match, and the number of the last: pass that as after to go on.
CREATE FUNCTION "postroom".requeue_parked(
    topic text DEFAULT NULL, key text DEFAULT NULL, message_id text DEFAULT NULL, error text DEFAULT NULL,
    older_than interval DEFAULT NULL, everything boolean DEFAULT false, who text DEFAULT NULL,
    reason text DEFAULT NULL, after bigint DEFAULT 0, most integer DEFAULT 10000,
    OUT messages bigint, OUT last bigint)
LANGUAGE sql BEGIN ATOMIC
SELECT * FROM "postroom".change_parked('requeue', NULL, topic, key, message_id, error, older_than,
                                       everything, who, reason, after, most);
END;

-- discard_parked gives up refused and waiting messages: they will not be
-- published, and stand in outbox_parked_history as they were.
CREATE FUNCTION "postroom".discard_parked(
    topic text DEFAULT NULL, key text DEFAULT NULL, message_id text DEFAULT NULL, error text DEFAULT NULL,
    older_than interval DEFAULT NULL, everything boolean DEFAULT false, who text DEFAULT NULL,
    reason text DEFAULT NULL, after bigint DEFAULT 0, most integer DEFAULT 10000,
    OUT messages bigint, OUT last bigint)
LANGUAGE sql BEGIN ATOMIC
SELECT * FROM "postroom".change_parked('discard', NULL, topic, key, message_id, error, older_than,
                                       everything, who, reason, after, most);
END;

-- redirect_parked sends refused and waiting messages to another topic, in their
-- order and behind what that topic has already: a misspelt name.
CREATE FUNCTION "postroom".redirect_parked(
    target text,
    topic text DEFAULT NULL, key text DEFAULT NULL, message_id text DEFAULT NULL, error text DEFAULT NULL,
    older_than interval DEFAULT NULL, everything boolean DEFAULT false, who text DEFAULT NULL,
    reason text DEFAULT NULL, after bigint DEFAULT 0, most integer DEFAULT 10000,
    OUT messages bigint, OUT last bigint)
LANGUAGE sql BEGIN ATOMIC
SELECT * FROM "postroom".change_parked('redirect', target, topic, key, message_id, error, older_than,
                                       everything, who, reason, after, most);
END;
