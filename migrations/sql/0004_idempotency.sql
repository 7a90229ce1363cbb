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

-- Says what an operator has found out about a key in state unknown: that its
-- request had its effect (done), so that repeats get the status with an empty body
-- for a day at least, or that it had none, so that the next may run. It returns
-- whether there is such a key.
CREATE FUNCTION "postroom".resolve_idempotency_key(
    tenant text, operation text, key text, done boolean, status integer DEFAULT 200) RETURNS boolean
LANGUAGE sql BEGIN ATOMIC
    WITH resolved AS (
        UPDATE "postroom".idempotency_keys k
           SET state = CASE WHEN resolve_idempotency_key.done THEN 'completed' ELSE 'released' END,
               completed_at = CASE WHEN resolve_idempotency_key.done THEN clock_timestamp() END,
               locked_until = clock_timestamp(),
               expires_at = greatest(k.expires_at, clock_timestamp() + interval '1 day'),
               tombstone_until = greatest(k.tombstone_until, clock_timestamp() + interval '2 days')
         WHERE k.tenant = resolve_idempotency_key.tenant AND k.operation = resolve_idempotency_key.operation
           AND k.key = resolve_idempotency_key.key AND k.state = 'unknown'
     RETURNING k.tenant, k.operation, k.key, k.expires_at
    ), kept AS (
        INSERT INTO "postroom".idempotency_answers AS a (tenant, operation, key, expires_at, status, body)
        SELECT r.tenant, r.operation, r.key, r.expires_at, resolve_idempotency_key.status, ''
          FROM resolved r WHERE resolve_idempotency_key.done
            ON CONFLICT (tenant, operation, key) DO UPDATE
           SET expires_at = excluded.expires_at, status = excluded.status, header_names = '{}',
               header_values = '{}', body = excluded.body
    )
    SELECT EXISTS (SELECT FROM resolved);
END;
