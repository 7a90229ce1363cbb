-- Keys of requests and calls that are run once, and what they were answered.

-- One row per tenant, operation and key. A row is
--   in_flight  claimed by the attempt whose number fence is. While the attempt's
--              transaction runs it locks the row, which tells that it lives; else
--              it may be taken over when locked_until has passed.
--   released   the attempt has failed without effect: the next may run at once.
--   completed  its effect has committed. The answer stands in idempotency_answers
--              until expires_at, and the row alone, a tombstone, until
--              tombstone_until.
--   unknown    nobody knows whether it had an effect: an operator decides.
-- What the first request was stays in fingerprint through all states. Updates
-- change no column that is indexed, except where an expired key begins anew.
CREATE TABLE "postroom".idempotency_keys (
    tenant              text        NOT NULL CHECK (tenant <> ''),
    operation           text        NOT NULL CHECK (operation <> ''),
    key                 text        NOT NULL CHECK (key <> ''),
    fingerprint         bytea       NOT NULL,
    fingerprint_version smallint    NOT NULL,
    state               text        NOT NULL CHECK (state IN ('in_flight', 'released', 'completed', 'unknown')),
    fence               bigint      NOT NULL,
    locked_until        timestamptz NOT NULL,
    first_seen          timestamptz NOT NULL,
    completed_at        timestamptz,
    expires_at          timestamptz NOT NULL,
    tombstone_until     timestamptz NOT NULL,
    resource_type       text,
    resource_id         text,
    PRIMARY KEY (tenant, operation, key),
    CHECK (expires_at <= tombstone_until),
    CHECK ((state = 'completed') = (completed_at IS NOT NULL)),
    CHECK ((resource_type IS NULL) = (resource_id IS NULL))
) WITH (fillfactor = 70);
CREATE INDEX idempotency_keys_tombstone ON "postroom".idempotency_keys (tombstone_until);

-- What a completed request was answered. body is NULL where it is not kept.
CREATE TABLE "postroom".idempotency_answers (
    tenant        text        NOT NULL,
    operation     text        NOT NULL,
    key           text        NOT NULL,
    expires_at    timestamptz NOT NULL,
    status        integer     NOT NULL,
    header_names  text[]      NOT NULL DEFAULT '{}',
    header_values bytea[]     NOT NULL DEFAULT '{}',
    body          bytea,
    PRIMARY KEY (tenant, operation, key),
    CHECK (cardinality(header_names) = cardinality(header_values))
);
CREATE INDEX idempotency_answers_expiry ON "postroom".idempotency_answers (expires_at);
