"use strict";
(() => {
  const make = (parent, name) => {
    const element = document.createElement("div");
    element.className = name;
    element.hidden = true;
    parent.append(element);
    return element;
  };
  const show = (value) => {
    const size = Math.abs(value);
    if (size >= 1e6) return (value / 1e6).toPrecision(4) + "M";
    if (size >= 1000) return Math.round(value).toLocaleString("en-US");
    return String(Number(value.toPrecision(4)));
  };
  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle; else high = middle;
    }
    return x - xs[low] <= xs[high] - x ? low : high;
  };
  const put = (tip, title, rows) => {
    tip.textContent = "";
    const head = document.createElement("b");
    head.textContent = title;
    tip.append(head);
    for (const [label, color, value] of rows) {
      const row = document.createElement("div"), name = document.createElement("span"), number = document.createElement("b");
      const mark = document.createElement("i");
      mark.style.setProperty("--c", color);
      name.append(mark, label);
      number.textContent = value;
      row.append(name, number);
      tip.append(row);
    }
  };
  const place = (tip, at) => {
    tip.hidden = false;
    tip.style.left = at > 0.5 ? "auto" : `calc(${at * 100}% + 12px)`;
    tip.style.right = at > 0.5 ? `calc(${(1 - at) * 100}% + 12px)` : "auto";
  };
  for (const chart of document.querySelectorAll(".chart")) {
    const data = JSON.parse(chart.querySelector('script[type="application/json"]').textContent);
    const area = chart.querySelector(".area"), cursor = make(area, "cursor"), tip = make(area, "tip");
    const all = data.bars || [...new Set(data.lines.flatMap((line) => line.x))].sort((a, b) => a - b);
    let index = all.length - 1;
    const point = () => {
      const x = all[index], bars = Boolean(data.bars);
      const at = bars ? (index + 0.5) / all.length : (x - data.x0) / (data.x1 - data.x0);
      const rows = [];
      let sum = 0;
      for (const line of data.lines) {
        const near = bars ? index : nearest(line.x, x);
        if (!bars && line.x[near] !== x && (x < line.x[0] || x > line.x[line.x.length - 1])) continue;
        sum += line.y[near];
        if (bars && !line.y[near]) continue;
        const other = !bars && line.x[near] !== x ? ` (step ${show(line.x[near])})` : "";
        rows.push([line.label + other, `var(--${bars ? "s" : "c"}${line.color})`, show(line.y[near]) + (data.suffix || "")]);
      }
      if (bars) rows.reverse().push(["together", "transparent", show(sum) + data.suffix]);
      put(tip, `${data.unit} ${show(Math.round(x))}`, rows);
      cursor.hidden = false;
      cursor.style.left = `${at * 100}%`;
      place(tip, at);
    };
    const hide = () => { cursor.hidden = tip.hidden = true; };
    area.addEventListener("pointermove", (event) => {
      const box = area.getBoundingClientRect(), at = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
      index = data.bars ? Math.min(all.length - 1, Math.floor(at * all.length)) : nearest(all, data.x0 + at * (data.x1 - data.x0));
      point();
    });
    area.addEventListener("pointerleave", hide);
    area.addEventListener("blur", hide);
    area.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!move) return;
      event.preventDefault();
      index = Math.min(all.length - 1, Math.max(0, index + move));
      point();
    });
  }
  for (const gantt of document.querySelectorAll(".gantt")) {
    for (const row of gantt.querySelectorAll(".row")) {
      const tip = make(row, "tip");
      row.addEventListener("pointermove", (event) => {
        const name = event.target.dataset ? event.target.dataset.n : null;
        if (!name) { tip.hidden = true; return; }
        const box = row.getBoundingClientRect();
        put(tip, `${name}: ${event.target.dataset.s}`, []);
        tip.style.top = "18px";
        place(tip, (event.clientX - box.left) / box.width);
      });
      row.addEventListener("pointerleave", () => { tip.hidden = true; });
    }
  }
})();
