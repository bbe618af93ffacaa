"use strict";
(() => {
  const css = getComputedStyle(document.body), color = (name) => css.getPropertyValue(name).trim();
  const isTouch = matchMedia("(pointer: coarse)").matches; // a finger scrolls the page and does not zoom a plot
  const template = () => {
    const axis = {
      color: color("--faint"), gridcolor: color("--grid"), zeroline: false, ticklabelstandoff: 6, fixedrange: isTouch,
    };
    return { layout: {
      xaxis: { ...axis, showgrid: false, nticks: 7, exponentformat: "SI", unifiedhovertitle: { text: "step %{x:,.0f}" } },
      yaxis: { ...axis, nticks: 6, exponentformat: "e", hoverformat: ".4~g" },
      font: { family: css.fontFamily, size: 11.5, color: color("--ink") }, margin: { l: 46, r: 12, t: 14, b: 24 },
      paper_bgcolor: "transparent", plot_bgcolor: "transparent", showlegend: false, barmode: "stack", bargap: 0.18,
      hovermode: "x unified", hoverlabel: { bgcolor: color("--card"), bordercolor: color("--rule"), namelength: -1 },
      dragmode: isTouch ? false : "zoom",
    } };
  };
  const draw = (plot) => {
    const text = plot.nextElementSibling.textContent.replace(/"(--[cs]\d)"/g, (_, name) => JSON.stringify(color(name)));
    const { data, layout } = JSON.parse(text);
    Plotly.react(plot, data, { ...layout, template: template() }, { displayModeBar: false, responsive: true });
  };
  const queue = [];
  const drawNext = () => {
    if (!queue.length) return;
    draw(queue.shift());
    setTimeout(drawNext);
  };
  const drawAll = (plots) => {
    queue.push(...plots);
    drawNext();
  };
  const readPoint = ({ key, currentTarget: plot }) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[key], curve = plot.data?.findIndex((trace) => trace.name);
    if (!move || curve < 0) return;
    const n = plot.data[curve].x.length;
    plot.point = Math.min(n - 1, Math.max(0, (plot.point ?? n) + move));
    Plotly.Fx.hover(plot, { xval: plot.data[curve].x[plot.point] });
  };
  document.querySelectorAll(".plot").forEach((plot) => plot.addEventListener("keydown", readPoint));
  document.querySelectorAll("details").forEach((details) =>
    details.addEventListener("toggle", () => drawAll(details.querySelectorAll(".plot")), { once: true }));
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  scheme.addEventListener("change", () => drawAll(document.querySelectorAll(".js-plotly-plot")));
  drawAll(document.querySelectorAll("section > :not(details) .plot"));
})();
