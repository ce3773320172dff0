// Put three messages into the queue `emails`.
const server = process.env.MILLSTREAM_SERVER ?? "http://127.0.0.1:8080";

for (const user of ["ada", "bob", "eve"]) {
  const answer = await fetch(`${server}/queues/emails/enqueue`, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ payload: { to: `${user}@example.com` } }),
  });
  if (!answer.ok) throw new Error(await answer.text());
  console.log(`sent ${user}@example.com`);
}
