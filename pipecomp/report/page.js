"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const narrow = window.innerWidth < 600;

  const bar = narrow ? 12 : 34;  // pixels of the toolbar, which stands above the names

  // Names stand above a chart, in so many lines.
  function lines(chart) {
    const named = chart.figure.layout.showlegend === false ? 0 : chart.figure.data.length;
    const width = document.getElementById(chart.key).clientWidth;
    return named > 1 ? Math.ceil(named / Math.max(1, Math.floor(width / (narrow ? 150 : 180)))) : 0;
  }

  function themed() {
    const axis = { gridcolor: color("--grid"), zerolinecolor: color("--grid"), linecolor: color("--line") };
    return {
      "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)", "font.color": color("--text"),
      "xaxis.gridcolor": axis.gridcolor, "xaxis.zerolinecolor": axis.zerolinecolor, "xaxis.linecolor": axis.linecolor,
      "yaxis.gridcolor": axis.gridcolor, "yaxis.zerolinecolor": axis.zerolinecolor, "yaxis.linecolor": axis.linecolor,
      "hoverlabel.bgcolor": color("--card"), "hoverlabel.bordercolor": color("--line"),
      "hoverlabel.font.color": color("--text"), "modebar.bgcolor": "rgba(0,0,0,0)", "modebar.color": color("--soft"),
      "modebar.activecolor": color("--accent"),
    };
  }

  function layout(given, height, above) {
    const slider = given.xaxis && given.xaxis.rangeslider;
    return {
      ...given,
      height,
      margin: { l: narrow ? 46 : 60, r: 14, t: bar + above, b: 50 },
      font: { family: "system-ui, -apple-system, Segoe UI, Roboto, Arial, sans-serif", size: narrow ? 11 : 13 },
      hoverlabel: { align: "left" },
      legend: {
        ...given.legend, orientation: "h", x: 0, xanchor: "left", y: 1 - bar / height, yref: "container", yanchor: "top",
      },
      xaxis: {
        ...given.xaxis, automargin: true, title: { ...(given.xaxis || {}).title, standoff: slider ? 4 : 10 },
        ...(slider && narrow ? { rangeslider: { visible: false } } : {}),
      },
    };
  }

  const drawn = charts.map((chart) => {
    const place = document.getElementById(chart.key);
    const above = 22 * lines(chart);
    const height = chart.height + above;
    place.style.height = `${height}px`;
    const buttons = ["lasso2d", "select2d", "autoScale2d"];
    const shown = narrow ? false : "hover";
    const options = { responsive: true, displaylogo: false, displayModeBar: shown, modeBarButtonsToRemove: buttons };
    return Plotly.newPlot(place, chart.figure.data, layout(chart.figure.layout, height, above), options).then(() =>
      Plotly.relayout(place, themed())
    );
  });
  Promise.all(drawn).then(() => { document.body.dataset.drawn = String(drawn.length); });
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", () => charts.forEach((chart) =>
    Plotly.relayout(document.getElementById(chart.key), themed())
  ));
})();
