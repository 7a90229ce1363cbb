-- Webhooks: what was received, and proven to come from its sender.

-- One row per delivery, written in one transaction with its message in the outbox.
-- It is no mark that work is done: that stands in processed_messages. header_names,
-- header_values and body are what was received, and null when a cleaner has dropped
-- them; the rest knows a repeat for longer.
CREATE TABLE "postroom".webhook_receipts (
    endpoint      text        NOT NULL CHECK (endpoint <> ''),
    delivery_id   text        NOT NULL CHECK (delivery_id <> ''),
    unsigned_id   boolean     NOT NULL,
    body_sha256   bytea       NOT NULL CHECK (length(body_sha256) = 32),
    message_id    text        NOT NULL,
    secret        text        NOT NULL,
    received_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    sent_at       timestamptz,
    header_names  bytea[],
    header_values bytea[],
    body          bytea,
    PRIMARY KEY (endpoint, delivery_id),
    CHECK (cardinality(header_names) = cardinality(header_values)),
    CHECK ((header_names IS NULL) = (header_values IS NULL) AND (header_names IS NULL) = (body IS NULL))
);
-- Where the sender does not sign the id, who captured a delivery may send its body
-- under another one.
CREATE UNIQUE INDEX webhook_receipts_body ON "postroom".webhook_receipts (endpoint, body_sha256) WHERE unsigned_id;
CREATE INDEX webhook_receipts_age ON "postroom".webhook_receipts (received_at);
CREATE INDEX webhook_receipts_whole ON "postroom".webhook_receipts (received_at) WHERE body IS NOT NULL;

-- Deliveries that came again under their id with another body. They went no further.
CREATE TABLE "postroom".webhook_conflicts (
    endpoint      text        NOT NULL,
    delivery_id   text        NOT NULL,
    body_sha256   bytea       NOT NULL CHECK (length(body_sha256) = 32),
    secret        text        NOT NULL,
    received_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    sent_at       timestamptz,
    header_names  bytea[]     NOT NULL,
    header_values bytea[]     NOT NULL,
    body          bytea       NOT NULL,
    PRIMARY KEY (endpoint, delivery_id, body_sha256),
    CHECK (cardinality(header_names) = cardinality(header_values))
);
CREATE INDEX webhook_conflicts_age ON "postroom".webhook_conflicts (received_at);
