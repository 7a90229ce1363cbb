-- The inbox: what each subscriber has handled, and what it could not handle.

-- One row per subscriber and message, written in the transaction of its effect.
-- An action that inbox.Once claims has a row of outcome 'once'. It stands under
-- its scope with a space before it, as no subscriber's name begins.
CREATE TABLE "postroom".processed_messages (
    subscriber_id text        NOT NULL CHECK (subscriber_id <> ''),
    message_id    text        NOT NULL CHECK (message_id <> ''),
    processed_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    outcome       text        NOT NULL DEFAULT 'handled' CHECK (outcome IN ('handled', 'dead', 'once')),
    PRIMARY KEY (subscriber_id, message_id),
    CHECK ((outcome = 'once') = (subscriber_id LIKE ' %'))
);

-- The newest version of each entity that inbox.Newer has let pass.
CREATE TABLE "postroom".inbox_versions (
    scope      text        NOT NULL CHECK (scope <> ''),
    entity     text        NOT NULL CHECK (entity <> ''),
    version    bigint      NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (scope, entity)
);

-- One row per message that a subscriber gave up on, written together with its
-- row of outcome 'dead' in processed_messages.
CREATE TABLE "postroom".inbox_dead_letters (
    subscriber_id text        NOT NULL CHECK (subscriber_id <> ''),
    message_id    text        NOT NULL CHECK (message_id <> ''),
    dead_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    attempts      integer     NOT NULL CHECK (attempts > 0),
    reason        text        NOT NULL CHECK (length(reason) <= 1000),
    source        text        NOT NULL,
    topic         text        NOT NULL,
    key           bytea,
    payload       bytea,
    header_names  bytea[]     NOT NULL DEFAULT '{}',
    header_values bytea[]     NOT NULL DEFAULT '{}',
    operation     text,
    written_at    timestamptz,
    PRIMARY KEY (subscriber_id, message_id),
    CHECK (cardinality(header_names) = cardinality(header_values))
);
CREATE INDEX inbox_dead_letters_at ON "postroom".inbox_dead_letters (subscriber_id, dead_at);
