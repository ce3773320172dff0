// A web site with the page browser.html, and the broker's queues below /queues/.
import { readFileSync } from "node:fs";
import http from "node:http";

const server = new URL(process.env.MILLSTREAM_SERVER ?? "http://127.0.0.1:8080");
const page = readFileSync(new URL("browser.html", import.meta.url));

const site = http.createServer((request, response) => {
  if (!request.url.startsWith("/queues/")) {
    response.setHeader("Content-Type", "text/html; charset=utf-8").end(page);
    return;
  }
  // `Host` goes on as it came, so the broker sees that the page is from the same place.
  const { method, url: path, headers } = request;
  const { hostname, port } = server;
  const onward = http.request({ hostname, port, method, path, headers }, (answer) => {
    response.writeHead(answer.statusCode, answer.headers);
    answer.pipe(response);
  });
  onward.on("error", (error) => response.writeHead(502).end(`${error.message}\n`));
  request.pipe(onward);
});
site.listen(process.env.PORT ?? 3000, "localhost", () => {
  console.log(`http://localhost:${site.address().port}`);
});
