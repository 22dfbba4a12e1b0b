"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];
  const make = (name, look, text) => {
    const made = document.createElement(name);
    if (look) made.className = look;
    if (text !== undefined) made.textContent = text; // never as markup: names are other people's text
    return made;
  };
  const draw = (parent, name, look, places) => {
    const made = document.createElementNS(SVG, name);
    made.setAttribute("class", look);
    for (const [key, value] of Object.entries(places)) made.setAttribute(key, value);
    parent.append(made);
  };

  // Charts: the mark that is nearest to the pointer, or the next one for the arrow keys.
  const tip = make("div", "tip");
  tip.hidden = true;
  tip.setAttribute("role", "status");
  document.body.append(tip);
  const known = new WeakMap();
  let shown = null;

  const marksOf = (chart) => {
    if (!known.has(chart)) known.set(chart, JSON.parse(chart.querySelector(".marks").textContent));
    return known.get(chart);
  };
  const frameOf = (svg) => {
    const [left, top, width, height] = svg.dataset.frame.split(" ").map(Number);
    return { left, top, width, height };
  };
  const layer = (svg, look) => {
    svg.querySelector(`g.${look}`)?.remove();
    const made = document.createElementNS(SVG, "g");
    made.setAttribute("class", look);
    svg.append(made);
    return made;
  };
  const hide = () => {
    tip.hidden = true;
    if (shown) shown.svg.querySelector("g.hover")?.remove();
    shown = null;
  };
  const show = (svg, number) => {
    const chart = svg.closest(".chart");
    const mark = marksOf(chart)[number];
    if (!mark) return hide();
    if (shown && shown.svg !== svg) hide();
    shown = { svg, number };
    const frame = frameOf(svg);
    const [x, y] = [frame.left + mark[0] * frame.width, frame.top + mark[1] * frame.height];
    const over = layer(svg, "hover");
    if (chart.dataset.near === "x") draw(over, "path", "guide", { d: `M${x} ${frame.top}V${frame.top + frame.height}` });
    else draw(over, "circle", "ring", { cx: x, cy: y, r: 6 });
    const table = make("table");
    for (const [look, name, text] of mark[3]) {
      const row = table.insertRow();
      const cell = row.insertCell();
      if (look) cell.append(make("i", `chip ${look}`));
      cell.append(name);
      row.insertCell().textContent = text;
    }
    tip.replaceChildren(make("b", "", mark[2]), table);
    tip.hidden = false;
    const box = svg.getBoundingClientRect();
    const scale = box.width / svg.viewBox.baseVal.width;
    const [place, size] = [{ x: box.left + x * scale, y: box.top + y * scale }, tip.getBoundingClientRect()];
    const right = place.x + 14 + size.width < innerWidth ? place.x + 14 : place.x - 14 - size.width;
    tip.style.left = `${Math.max(4, Math.min(right, innerWidth - size.width - 4))}px`;
    tip.style.top = `${Math.max(4, Math.min(place.y + 12, innerHeight - size.height - 4))}px`;
  };
  const nearest = (svg, event) => {
    const chart = svg.closest(".chart");
    const box = svg.getBoundingClientRect();
    const scale = svg.viewBox.baseVal.width / box.width;
    const frame = frameOf(svg);
    const x = (event.clientX - box.left) * scale - frame.left;
    const y = (event.clientY - box.top) * scale - frame.top;
    if (x < -12 || x > frame.width + 12 || y < -12 || y > frame.height + 12) return -1;
    let [found, best] = [-1, chart.dataset.near === "x" ? Infinity : 40 ** 2];
    marksOf(chart).forEach((mark, number) => {
      const across = mark[0] * frame.width - x;
      const down = chart.dataset.near === "x" ? 0 : mark[1] * frame.height - y;
      const far = across * across + down * down;
      if (far < best) [found, best] = [number, far];
    });
    return found;
  };
  const point = (event) => {
    const svg = event.target.closest?.("svg[data-frame]");
    if (!svg) return hide();
    const number = nearest(svg, event);
    if (number < 0) hide();
    else show(svg, number);
  };
  addEventListener("pointermove", point, { passive: true });
  addEventListener("pointerdown", point, { passive: true });
  addEventListener("scroll", hide, { passive: true });
  addEventListener("keydown", (event) => {
    const svg = document.activeElement?.closest?.("svg[data-frame]");
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") hide();
    if (!svg || !step) return;
    event.preventDefault();
    const many = marksOf(svg.closest(".chart")).length;
    show(svg, ((shown?.svg === svg ? shown.number + step : 0) + many) % many);
  });
  addEventListener("focusout", hide);

  // Tables: a click on a column sorts; a name or a kind of client filters tables and charts alike.
  const UNITS = { B: 1, kB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12 };
  const amount = (text) => {
    const found = /^[−+-]?[\d,]*\.?\d+(e-?\d+)?/.exec(text.trim());
    if (!found) return text.startsWith("∞") ? Infinity : NaN;
    const unit = /^ ?([kMGT]?B)\b/.exec(text.trim().slice(found[0].length).replace("\u00a0", " "));
    return Number(found[0].replaceAll(",", "").replace("−", "-")) * (unit ? UNITS[unit[1]] : 1);
  };
  const sorted = new Map(); // of each table: column and direction
  const sort = (table) => {
    const [column, down] = sorted.get(table.id) ?? [];
    if (column === undefined || !table.tHead.rows[0].cells[column]) return;
    const rows = [...table.tBodies[0].rows].map((row) => {
      const text = row.cells[column].textContent.trim();
      return { row, text, value: amount(text) };
    });
    const words = rows.some(({ text, value }) => Number.isNaN(value) && text !== "–");
    const order = (a, b) => {
      if (words) return a.text.localeCompare(b.text, undefined, { numeric: true });
      if (Number.isNaN(a.value) || Number.isNaN(b.value)) return Number.isNaN(a.value) - Number.isNaN(b.value);
      return a.value < b.value ? -1 : a.value > b.value ? 1 : 0;
    };
    rows.sort((a, b) => (down ? order(b, a) : order(a, b)));
    table.tBodies[0].append(...rows.map(({ row }) => row));
    [...table.tHead.rows[0].cells].forEach((cell, number) => {
      if (number === column) cell.setAttribute("aria-sort", down ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    });
  };
  const filter = () => {
    const find = document.getElementById("find");
    if (!find) return;
    const text = find.value.trim().toLowerCase();
    const only = document.getElementById("only").value;
    let [some, many] = [0, 0];
    const names = new Set();
    for (const row of all(".long tbody tr")) {
      const name = row.cells[0].textContent;
      const fits = name.toLowerCase().includes(text) && (!only || row.classList.contains(only));
      row.hidden = !fits;
      many += 1;
      some += fits;
      if (fits) names.add(name);
    }
    const active = Boolean(text || only);
    document.getElementById("found").textContent = active ? `${some} of ${many} rows` : "";
    for (const chart of all(".clients-chart .chart")) {
      for (const svg of all("svg", chart)) {
        const over = layer(svg, "matches");
        const frame = frameOf(svg);
        if (!active) continue;
        for (const mark of marksOf(chart)) {
          if (!names.has(mark[2])) continue;
          const place = { cx: frame.left + mark[0] * frame.width, cy: frame.top + mark[1] * frame.height, r: 6 };
          draw(over, "circle", "match", place);
        }
      }
    }
  };
  const dress = (inside) => {
    for (const table of all("table.sortable", inside)) {
      [...table.tHead.rows[0].cells].forEach((cell, column) => {
        const button = make("button", "", cell.textContent);
        button.type = "button";
        button.addEventListener("click", () => {
          const [before, down] = sorted.get(table.id) ?? [];
          sorted.set(table.id, [column, before === column ? !down : column > 0]);
          sort(table);
        });
        cell.replaceChildren(button);
      });
      sort(table);
    }
    for (const tools of all(".tools", inside)) tools.hidden = false;
    for (const control of all("#find, #only", inside)) control.addEventListener("input", filter);
  };
  // Where the reader is.
  const follow = () => {
    let here = "";
    for (const part of all("main [data-part]")) if (part.getBoundingClientRect().top < 120) here = part.id;
    const named = all("nav a").filter((link) => !link.classList.contains("home"));
    let last = null;
    const order = all("main [data-part]").map((part) => part.id);
    for (const link of named) {
      link.classList.remove("here");
      if (order.indexOf(link.hash.slice(1)) <= order.indexOf(here) && order.includes(here)) last = link;
    }
    last?.classList.add("here");
  };
  let waiting = false;
  addEventListener("scroll", () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; follow(); });
  }, { passive: true });
  addEventListener("beforeprint", () => { for (const one of all("details")) one.open = true; });

  // The live view: parts that have changed are replaced; scroll, filters, order and open details stay.
  const texts = new Map(all("[data-part]").map((part) => [part.id, part.outerHTML]));
  const replace = (old, part) => {
    const open = new Map(all("details", old).map((one) => [one.dataset.key, one.open]));
    const places = new Map(all("[data-scroll]", old).map((one) => [one.dataset.scroll, [one.scrollLeft, one.scrollTop]]));
    const values = new Map(all("input, select", old).map((one) => [one.id, one.value]));
    const focused = old.contains(document.activeElement) ? document.activeElement.id : "";
    old.replaceWith(part);
    dress(part);
    for (const one of all("details", part)) if (open.has(one.dataset.key)) one.open = open.get(one.dataset.key);
    for (const one of all("input, select", part)) if (values.has(one.id)) one.value = values.get(one.id);
    for (const one of all("[data-scroll]", part)) {
      if (places.has(one.dataset.scroll)) [one.scrollLeft, one.scrollTop] = places.get(one.dataset.scroll);
    }
    if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
  };
  const apply = (text) => {
    const page = new DOMParser().parseFromString(text, "text/html");
    const anchor = all("main [data-part]").find((part) => part.getBoundingClientRect().bottom > 0);
    const before = anchor ? [anchor.id, anchor.getBoundingClientRect().top] : null;
    const parts = all("[data-part]", page);
    for (const old of all("[data-part]")) {
      if (!parts.some((part) => part.id === old.id)) { old.remove(); texts.delete(old.id); }
    }
    let last = null;
    for (const part of parts) {
      const html = part.outerHTML;
      const old = document.getElementById(part.id);
      const made = document.importNode(part, true);
      if (old && texts.get(part.id) === html) { last = old; continue; }
      if (old) replace(old, made);
      else { (last ?? document.getElementById("live")).after(made); dress(made); }
      texts.set(part.id, html);
      last = made;
    }
    document.title = page.title;
    hide();
    filter();
    follow();
    const after = before && document.getElementById(before[0]);
    if (after && scrollY > 0) scrollBy(0, after.getBoundingClientRect().top - before[1]);
  };
  const status = document.getElementById("live");
  const say = (text, look) => {
    if (status.textContent !== text) status.textContent = text;
    status.className = `box ${look}`;
  };
  let version = document.documentElement.dataset.live;
  let changed = Date.now();
  const ended = () => document.getElementById("overview").hasAttribute("data-ended");
  const clock = (time) => new Date(time).toLocaleTimeString();
  const ask = async () => {
    if (ended()) return say("The run has ended. This page is complete and no longer changes.", "calm");
    try {
      const answer = await fetch(`update?known=${version}`, { cache: "no-store" });
      if (answer.status === 200) {
        const text = await answer.text();
        version = answer.headers.get("X-Polyeps-Version");
        changed = Date.now();
        apply(text);
      } else if (answer.status === 503) {
        return say(`The run cannot be read: ${await answer.text()}`, "alarm"), setTimeout(ask, 5000);
      } else if (answer.status !== 204) return say("The live view has ended: open the address that polyeps watch prints.", "alarm");
      const quiet = Math.round((Date.now() - changed) / 60000);
      const idle = quiet >= 2 ? ` No change for ${quiet} minutes: the run may have been stopped.` : "";
      say(`Live view: last change at ${clock(changed)}.${idle}`, "wait");
    } catch {
      say("The connection is lost: polyeps watch has been stopped. The figures are the last ones.", "alarm");
    }
    setTimeout(ask, ended() ? 0 : 2000);
  };

  dress(document);
  follow();
  if (version) ask();
  document.documentElement.dataset.ready = "1";
})();
