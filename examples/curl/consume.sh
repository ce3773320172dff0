#!/bin/sh
# Take messages from the queue `emails` until none comes for two seconds.
set -eu
server=${MILLSTREAM_SERVER:-http://127.0.0.1:8080}

# 204 has no body, so nothing is left to print.
while message=$(curl --silent --show-error --fail "$server/queues/emails/dequeue?timeout=2") &&
    [ -n "$message" ]; do
    echo "$message" | sed 's/.*"to": *"\([^"]*\)".*/got \1/'
done
