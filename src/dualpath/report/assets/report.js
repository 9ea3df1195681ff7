// Draws the charts, in the page's theme, and their tables of numbers. Asks the network for nothing.
(() => {
  "use strict";
  const root = document.documentElement;
  const narrow = matchMedia("(max-width: 40rem)");
  const touch = matchMedia("(pointer: coarse)");
  const charts = JSON.parse(document.getElementById("charts").textContent);

  function color(name) {
    return getComputedStyle(root).getPropertyValue(`--${name}`).trim();
  }

  // Plotly takes names for markup.
  function plain(text) {
    return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");
  }

  function themed(trace) {
    const slot = color(`slot-${trace.meta.slot}`);
    const copy = { ...trace, name: plain(trace.name), marker: { ...trace.marker, color: slot } };
    if (trace.line) copy.line = { ...trace.line, color: slot };
    if (trace.marker.pattern) {
      copy.marker.pattern = { ...trace.marker.pattern, fgcolor: color("surface") };
      copy.marker.line = { color: color("surface"), width: 1 };
    }
    return copy;
  }

  function axis(given, tickfont) {
    return {
      ...given,
      ...(given.type === "category" ? categories(given) : {}),
      gridcolor: color("grid"), linecolor: color("rule"), zerolinecolor: color("rule"), tickcolor: color("rule"),
      tickfont, title: { ...given.title, font: { size: 13, color: color("quiet") }, standoff: 12 },
    };
  }

  // On a phone a category's name takes two lines, so that bars keep their room.
  function categories(given) {
    const names = given.tickvals.map(plain);
    return { ticktext: narrow.matches ? names.map((name) => name.replace(", ", "<br>")) : names };
  }

  function layout(given) {
    const text = color("text");
    const font = { color: text, size: 12, family: getComputedStyle(document.body).fontFamily };
    return {
      ...given,
      xaxis: axis(given.xaxis, { color: color("quiet") }),
      yaxis: axis(given.yaxis, { color: color("quiet") }),
      font, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 12, r: 14, t: 8, b: 12, pad: 2 },
      hoverlabel: { bgcolor: color("surface"), bordercolor: color("rule"), font: { ...font } },
      legend: {
        ...given.legend, orientation: "h", x: 0, xanchor: "left", y: 1.03, yanchor: "bottom", font: { ...font },
        bgcolor: "rgba(0,0,0,0)",
      },
      shapes: (given.shapes || []).map((shape) => ({
        ...shape, line: { ...shape.line, color: color("bad") },
        label: { ...shape.label, text: plain(shape.label.text), font: { size: 12, color: color("bad") } },
      })),
      // A finger that scrolls the page must not zoom a chart.
      dragmode: touch.matches ? false : "zoom",
    };
  }

  function config() {
    return {
      responsive: true, displaylogo: false, scrollZoom: false, showTips: false,
      displayModeBar: narrow.matches || touch.matches ? false : "hover",
      modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
    };
  }

  function viewOf(panel) {
    const select = panel.querySelector("select");
    return charts[panel.id][select ? Number(select.value) : Number(panel.dataset.first)];
  }

  function draw(panel) {
    const view = viewOf(panel);
    const place = panel.querySelector(".chart");
    place.setAttribute("aria-label", view.alt);
    panel.querySelector(".note").textContent = view.note;
    if (panel.querySelector("details").open) fillTable(panel);
    const bars = view.figure.layout.barmode ? view.figure.data[0].y.length : 0;
    if (bars) place.style.height = `${Math.max(16, 9 + 2.6 * bars)}rem`;
    return Plotly.react(place, view.figure.data.map(themed), layout(view.figure.layout), config());
  }

  function shown(value, percent) {
    if (value === null || value === undefined) return "";
    if (typeof value === "string") return value;
    if (percent) return `${(value * 100).toFixed(1)} %`;
    return Number(value.toPrecision(5)).toLocaleString("en", { maximumSignificantDigits: 5 });
  }

  // A row for each value of the axis that the series share, a column for each series.
  function fillTable(panel) {
    const view = viewOf(panel);
    const [rowAxis, valueAxis] = view.rows_by_y ? ["y", "x"] : ["x", "y"];
    const isPercent = (name) => view.figure.layout[`${name}axis`].tickformat === ".0%";
    const rows = new Map();
    view.figure.data.forEach((series, column) => {
      series[rowAxis].forEach((key, index) => {
        if (!rows.has(key)) rows.set(key, []);
        rows.get(key)[column] = series[valueAxis][index];
      });
    });
    const keys = [...rows.keys()];
    if (keys.every((key) => typeof key === "number")) keys.sort((a, b) => a - b);
    const table = document.createElement("table");
    const head = table.createTHead().insertRow();
    view.columns.forEach((name) => {
      const cell = document.createElement("th");
      cell.scope = "col";
      cell.textContent = name;
      head.append(cell);
    });
    const body = table.createTBody();
    keys.forEach((key) => {
      const row = body.insertRow();
      const cell = document.createElement("th");
      cell.scope = "row";
      cell.textContent = shown(key, isPercent(rowAxis));
      row.append(cell);
      view.figure.data.forEach((_, column) => {
        row.insertCell().textContent = shown(rows.get(key)[column], isPercent(valueAxis));
      });
    });
    panel.querySelector("details .scroll").replaceChildren(table);
  }

  const panels = [...document.querySelectorAll(".panel")];
  const drawAll = () => Promise.all(panels.map(draw));

  document.addEventListener("themechange", drawAll);
  narrow.addEventListener("change", drawAll);
  panels.forEach((panel) => {
    panel.querySelector("select")?.addEventListener("change", () => draw(panel));
    panel.querySelector("details").addEventListener("toggle", () => fillTable(panel));
  });
  drawAll().then(() => {
    root.dataset.drawn = "yes";
  });
})();
