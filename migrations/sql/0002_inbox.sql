-- The inbox: what each subscriber has handled, and what it could not handle.

-- One row per subscriber and message, written in the transaction of its effect.
-- An action that inbox.Once claims has a row of outcome 'once'. It stands under
-- its scope with a space before it, as no subscriber's name begins.
CREATE TABLE "postroom".processed_messages (
    subscriber_id text        NOT NULL CHECK (subscriber_id <> ''),
    message_id    text        NOT NULL CHECK (message_id <> ''),
    processed_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    outcome       text        NOT NULL DEFAULT 'handled' CHECK (outcome IN ('handled', 'dead', 'waiting', 'once')),
    PRIMARY KEY (subscriber_id, message_id),
    CHECK ((outcome = 'once') = (subscriber_id LIKE ' %'))
);
-- What a cleaner may delete by its age alone.
CREATE INDEX processed_messages_age ON "postroom".processed_messages (subscriber_id, processed_at)
 WHERE outcome IN ('handled', 'once');
CREATE INDEX processed_messages_aside ON "postroom".processed_messages (subscriber_id, processed_at)
 WHERE outcome IN ('dead', 'waiting');

-- The newest version of each entity that inbox.Newer has let pass.
CREATE TABLE "postroom".inbox_versions (
    scope      text        NOT NULL CHECK (scope <> ''),
    entity     text        NOT NULL CHECK (entity <> ''),
    version    bigint      NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (scope, entity)
);

-- One row per message that a subscriber gave up on ('dead') and has not been
-- told to handle again ('requeued'), or that waits behind one of its topic and
-- key. It is written and deleted together with the change of the message's row in
-- processed_messages. Rows of a key are handled in the order of their numbers.
CREATE TABLE "postroom".inbox_dead_letters (
    number        bigint      NOT NULL GENERATED ALWAYS AS IDENTITY,
    subscriber_id text        NOT NULL CHECK (subscriber_id <> ''),
    message_id    text        NOT NULL CHECK (message_id <> ''),
    state         text        NOT NULL DEFAULT 'dead' CHECK (state IN ('dead', 'requeued', 'waiting')),
    dead_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    requeued_at   timestamptz,
    requeues      integer     NOT NULL DEFAULT 0 CHECK (requeues >= 0),
    repeats       bigint      NOT NULL DEFAULT 0 CHECK (repeats >= 0),
    attempts      integer     NOT NULL CHECK (attempts >= 0),
    reason        text        CHECK (length(reason) <= 1000),
    source        text        NOT NULL,
    topic         text        NOT NULL,
    key           bytea,
    payload       bytea,
    header_names  bytea[]     NOT NULL DEFAULT '{}',
    header_values bytea[]     NOT NULL DEFAULT '{}',
    operation     text,
    written_at    timestamptz,
    PRIMARY KEY (subscriber_id, message_id),
    CHECK (cardinality(header_names) = cardinality(header_values)),
    CHECK (CASE WHEN state = 'waiting' THEN reason IS NULL AND attempts = 0 AND key IS NOT NULL
                ELSE reason IS NOT NULL AND attempts > 0 END),
    CHECK (state <> 'requeued' OR requeued_at IS NOT NULL)
);
CREATE INDEX inbox_dead_letters_number ON "postroom".inbox_dead_letters (subscriber_id, number);
CREATE INDEX inbox_dead_letters_due ON "postroom".inbox_dead_letters (subscriber_id, number) WHERE state <> 'dead';
CREATE INDEX inbox_dead_letters_key ON "postroom".inbox_dead_letters (subscriber_id, sha256(key), number) WHERE key IS NOT NULL;

-- Has dead letters of a subscriber handled again: all of them, or those of the
-- given message ids. It returns how many it found. The subscriber's consumers run
-- them soon after the commit.
CREATE FUNCTION "postroom".requeue_dead_letters(subscriber text, ids text[] DEFAULT NULL) RETURNS bigint
LANGUAGE sql VOLATILE
BEGIN ATOMIC
    WITH letters AS (
        SELECT message_id FROM "postroom".inbox_dead_letters
         WHERE subscriber_id = subscriber AND state = 'dead' AND (ids IS NULL OR message_id = ANY (ids))
         ORDER BY message_id FOR UPDATE
    ), requeued AS (
        UPDATE "postroom".inbox_dead_letters d
           SET state = 'requeued', requeued_at = clock_timestamp(), requeues = requeues + 1
          FROM letters l
         WHERE d.subscriber_id = subscriber AND d.message_id = l.message_id
     RETURNING 1
    )
    SELECT count(*) FROM requeued;
END;
