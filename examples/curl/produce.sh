#!/bin/sh
# Put three messages into the queue `emails`.
set -eu
server=${MILLSTREAM_SERVER:-http://127.0.0.1:8080}

for user in ada bob eve; do
    curl --silent --show-error --fail "$server/queues/emails/enqueue" \
        --json "{\"payload\": {\"to\": \"$user@example.com\"}}" >/dev/null
    echo "sent $user@example.com"
done
