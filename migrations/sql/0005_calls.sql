-- Outgoing calls: when the first attempt under a key was sent, and with what body.

CREATE TABLE "postroom".idempotency_calls (
    target      text        NOT NULL CHECK (target <> ''),
    key         text        NOT NULL CHECK (key <> ''),
    body_sha256 bytea       CHECK (length(body_sha256) = 32),
    first_sent  timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (target, key)
);
CREATE INDEX idempotency_calls_age ON "postroom".idempotency_calls (first_sent);
