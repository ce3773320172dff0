// Shows what /openapi.json says, and sends requests. No library, nothing from elsewhere.
"use strict";

const METHODS = ["get", "head", "post", "put", "patch", "delete"];

// Children are nodes or text: nothing that a broker says is ever read as HTML.
function make(tag, properties, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

// Text with `code` in it.
function prose(text, tag = "p") {
  const parts = String(text || "").split("`");
  return make(tag, {}, ...parts.map((part, at) => (at % 2 ? make("code", {}, part) : part)));
}

function paragraphs(text) {
  return String(text || "").trim().split(/\n\s*\n/).filter(Boolean).map((part) => prose(part));
}

// ---- schemas

class Schemas {
  constructor(page) {
    this.page = page;
  }

  resolve(schema) {
    let found = schema || {};
    // A chain of references has an end, but a page that is wrong must not hang.
    for (let step = 0; found.$ref && step < 20; step += 1) {
      found = found.$ref.slice(2).split("/").reduce((at, key) => (at || {})[key], this.page) || {};
    }
    return found;
  }

  example(schema, depth = 0) {
    const found = this.resolve(schema);
    if (found.example !== undefined) return found.example;
    if (found.enum) return found.enum[0];
    if (found.anyOf || found.oneOf) return this.example((found.anyOf || found.oneOf)[0], depth);
    const type = Array.isArray(found.type) ? found.type[0] : found.type;
    if (depth > 6) return null;
    if (type === "object") {
      const entries = Object.entries(found.properties || {});
      return Object.fromEntries(entries.map(([key, one]) => [key, this.example(one, depth + 1)]));
    }
    if (type === "array") return [this.example(found.items, depth + 1)];
    if (type === "integer" || type === "number") return found.minimum ?? 0;
    if (type === "boolean") return true;
    if (type === "string") return "text";
    return { any: "JSON" };
  }

  // A short word for a type, as in `integer from 1 to 1000`.
  word(schema) {
    const found = this.resolve(schema);
    if (found.anyOf || found.oneOf) {
      return (found.anyOf || found.oneOf).map((one) => this.word(one)).join(" or ");
    }
    if (found.enum) return found.enum.map((one) => JSON.stringify(one)).join(" or ");
    const type = Array.isArray(found.type) ? found.type.join(" or ") : found.type || "anything";
    if (found.format === "binary") return "bytes";
    if (type === "array") return `list of ${this.word(found.items)}`;
    const from = found.minimum === undefined ? "" : ` from ${found.minimum}`;
    return type + from + (found.maximum === undefined ? "" : ` to ${found.maximum}`);
  }

  // The fields of an object, one a row; nothing for what has none.
  table(schema) {
    const found = this.resolve(schema);
    const variants = found.anyOf || found.oneOf;
    if (variants) {
      const tables = variants.map((one) => this.table(one)).filter(Boolean);
      return tables.length ? make("div", {}, ...tables) : null;
    }
    if (!found.properties) return null;
    const required = new Set(found.required || []);
    const rows = Object.entries(found.properties).map(([name, one]) =>
      make("tr", {},
        make("td", {}, make("code", {}, name), required.has(name) ? "" : " (optional)"),
        make("td", { className: "dim" }, this.word(one)),
        make("td", {}, prose(this.resolve(one).description, "span"))));
    return make("table", {}, ...rows);
  }
}

// ---- one route

class Route {
  constructor(schemas, path, method, operation) {
    this.schemas = schemas;
    this.path = path;
    this.method = method;
    this.operation = operation;
    this.inputs = new Map();
    this.media = null;
    this.body = null;
    this.node = this.build();
  }

  get text() {
    return `${this.method} ${this.path} ${this.operation.summary || ""}`.toLowerCase();
  }

  build() {
    const inside = make("div", {});
    const node = make("details", { className: "route", id: `${this.method}${this.path}` },
      make("summary", {},
        make("span", { className: `method ${this.method}` }, this.method.toUpperCase()),
        make("span", { className: "path" }, this.path),
        prose(this.operation.summary, "span")),
      inside);
    // A page with many routes opens at once: a route is filled when it is looked at.
    node.addEventListener("toggle", () => {
      if (node.open && !inside.hasChildNodes()) this.fill(inside);
    });
    return node;
  }

  fill(inside) {
    inside.append(...paragraphs(this.operation.description));
    this.addParameters(inside);
    this.addBody(inside);
    this.addSending(inside);
    this.addAnswers(inside);
  }

  addParameters(inside) {
    const parameters = this.operation.parameters || [];
    if (!parameters.length) return;
    const rows = parameters.map((parameter) => {
      const input = make("input", {
        value: parameter.example ?? "",
        placeholder: parameter.required ? "required" : "",
        ariaLabel: parameter.name,
      });
      this.inputs.set(parameter, input);
      return make("tr", {},
        make("td", {}, make("code", {}, parameter.name),
          make("div", { className: "dim" }, `${parameter.in}, ${this.schemas.word(parameter.schema)}`)),
        make("td", {}, input),
        make("td", {}, prose(parameter.description, "span")));
    });
    inside.append(make("h3", {}, "Parameters"), make("table", {}, ...rows));
  }

  addBody(inside) {
    const content = (this.operation.requestBody || {}).content;
    if (!content) return;
    const kinds = Object.keys(content);
    this.media = make("select", { ariaLabel: "Media type" },
      ...kinds.map((kind) => make("option", { value: kind }, kind)));
    this.body = make("textarea", { ariaLabel: "Body", spellcheck: false });
    const fields = make("div", {});
    const show = () => {
      const { schema } = content[this.media.value];
      const isJson = this.media.value === "application/json";
      this.body.value = isJson ? JSON.stringify(this.schemas.example(schema), null, 2) : "hello";
      const table = this.schemas.table(schema);
      fields.replaceChildren(...(table ? [table] : []));
    };
    this.media.addEventListener("change", show);
    show();
    inside.append(make("h3", {}, "Body"), make("div", { className: "row" }, this.media),
      this.body, fields);
  }

  addAnswers(inside) {
    const rows = Object.entries(this.operation.responses || {}).map(([status, response]) => {
      const shapes = Object.entries(response.content || {}).map(([kind, { schema }]) =>
        make("details", {},
          make("summary", { className: "dim" }, kind),
          this.schemas.table(schema) || make("span", {}, this.schemas.word(schema))));
      return make("tr", {},
        make("td", {}, make("code", {}, status)),
        make("td", {}, prose(response.description, "span"), ...shapes));
    });
    inside.append(make("h3", {}, "Answers"), make("table", {}, ...rows));
  }

  addSending(inside) {
    const button = make("button", { type: "button" }, "Send");
    const accept = make("select", { ariaLabel: "Accept" },
      ...this.accepts().map((kind) => make("option", { value: kind }, kind)));
    const result = make("div", { ariaLive: "polite" });
    button.addEventListener("click", async () => {
      button.disabled = true;
      try {
        result.replaceChildren(...(await this.send(accept.value)));
      } catch (error) {
        result.replaceChildren(make("p", { className: "bad" }, String(error.message || error)));
      } finally {
        button.disabled = false;
      }
    });
    inside.append(make("div", { className: "row" }, button,
      make("label", {}, "as ", accept)), result);
  }

  accepts() {
    const replies = Object.entries(this.operation.responses || {});
    const good = replies.filter(([status]) => status < "300");
    const kinds = good.flatMap(([, response]) => Object.keys(response.content || {}));
    return kinds.length ? [...new Set(kinds)] : ["*/*"];
  }

  target() {
    let path = this.path;
    const query = new URLSearchParams();
    for (const [parameter, input] of this.inputs) {
      const value = input.value.trim();
      if (!value && parameter.required) throw new Error(`${parameter.name} is needed`);
      if (parameter.in === "path") {
        path = path.replace(`{${parameter.name}}`, encodeURIComponent(value));
      } else if (value && parameter.in === "query") {
        query.set(parameter.name, value);
      }
    }
    const text = query.toString();
    return text ? `${path}?${text}` : path;
  }

  async send(accept) {
    const target = this.target();
    const request = { method: this.method.toUpperCase(), headers: { accept } };
    if (this.body !== null && (this.body.value || this.operation.requestBody.required)) {
      request.body = this.body.value;
      request.headers["content-type"] = this.media.value;
    }
    // Relative to where the page is, so that it also works behind a proxy's prefix.
    const begin = performance.now();
    const answer = await fetch(target.slice(1), request);
    const text = await answer.text();
    const took = (performance.now() - begin).toFixed(1);
    const heads = [...answer.headers].map(([name, value]) => `${name}: ${value}`).join("\n");
    return [
      make("h3", {}, "As a command"),
      make("pre", {}, this.command(target, request)),
      make("h3", {}, "Answer"),
      make("p", { className: answer.ok ? "" : "bad" },
        `${answer.status} ${answer.statusText} in ${took} ms`),
      make("pre", { className: "dim" }, heads),
      text ? make("pre", {}, pretty(text)) : make("p", { className: "dim" }, "no body"),
    ];
  }

  command(target, request) {
    const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
    const url = new URL(target.slice(1), document.baseURI);
    const parts = ["curl"];
    if (request.method === "HEAD") parts.push("--head");
    else if (request.method !== "GET") parts.push("-X", request.method);
    parts.push(quoted(url.href));
    for (const [name, value] of Object.entries(request.headers)) {
      if (value !== "*/*") parts.push("-H", quoted(`${name}: ${value}`));
    }
    if (request.body !== undefined) parts.push("--data-binary", quoted(request.body));
    return parts.join(" ");
  }
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

// ---- the page

function routesOf(page, schemas) {
  return Object.entries(page.paths).flatMap(([path, item]) =>
    METHODS.filter((method) => item[method]).map((method) =>
      new Route(schemas, path, method, item[method])));
}

function show(page) {
  const schemas = new Schemas(page);
  const routes = routesOf(page, schemas);
  document.getElementById("version").textContent = page.info.version;
  const tags = (page.tags || []).map((tag) => tag.name);
  const tagOf = (route) => (route.operation.tags || ["other"])[0];
  const all = [...new Set([...tags, ...routes.map(tagOf)])];
  const sections = all.map((name) => {
    const known = (page.tags || []).find((tag) => tag.name === name) || {};
    const own = routes.filter((route) => tagOf(route) === name);
    return make("section", { hidden: !own.length }, make("h2", {}, name),
      prose(known.description), ...own.map((route) => route.node));
  });
  const main = document.getElementById("page");
  main.replaceChildren(...paragraphs(page.info.description), ...sections);
  main.ariaBusy = "false";
  document.getElementById("filter").addEventListener("input", (event) => {
    const wanted = event.target.value.trim().toLowerCase();
    for (const route of routes) route.node.hidden = !route.text.includes(wanted);
    for (const section of sections) {
      section.hidden = !section.querySelector("details.route:not([hidden])");
    }
  });
  const linked = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (linked) linked.open = true;
}

async function begin() {
  try {
    const answer = await fetch("openapi.json");
    if (!answer.ok) throw new Error(`the broker answered ${answer.status}`);
    show(await answer.json());
  } catch (error) {
    const status = document.getElementById("status") || document.getElementById("page");
    status.textContent = `openapi.json could not be read: ${error.message || error}`;
    status.className = "bad";
  }
}

begin();
