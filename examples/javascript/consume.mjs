// Take messages from the queue `emails` until none comes for two seconds.
const server = process.env.MILLSTREAM_SERVER ?? "http://127.0.0.1:8080";

for (;;) {
  const answer = await fetch(`${server}/queues/emails/dequeue?timeout=2`);
  if (answer.status === 204) break;
  if (!answer.ok) throw new Error(await answer.text());
  const { payload } = await answer.json();
  console.log(`got ${payload.to}`);
}
