"""How a report looks, on a screen in the light or the dark, on a phone, on paper.

Blues are weights and what is computed from them, teal is what was gathered, orange is gradients,
yellow is torch's own, grey is plumbing: they differ in lightness too, so that no eye and no printer
has to tell them by hue. Neither `<` nor `&` occurs, so the page is XML.
"""

from __future__ import annotations

_LIGHT = """
--page:#fbfaf7;--ink:#1d2126;--quiet:#656b73;--rule:#dcdad3;--grid:#1d212614;--panel:#ffffff;
--weight:#1f4e79;--master:#5f8db6;--optimizer:#a9c6df;--grad:#a8480f;--partial_grad:#eda35f;--feedback:#c98b7a;
--secondary:#0f4f4a;--unsharded:#23817a;--activation:#8a5a9e;--staging:#474b50;--wire:#b9b7ae;--torch:#f0d98a;
--other:#d7a9b9;--forward:#8fb4d4;--recompute:#c3d6e6;--backward:#3f6f9e;--wait:#c4314b;
--unpack:#ddd5c6;--step:#3c4650;--flush:#cdb0da;--bartext:#10151a;"""

_DARK = """
--page:#14171a;--ink:#e8e6e1;--quiet:#9aa1a9;--rule:#31363c;--grid:#ffffff17;--panel:#1a1e22;
--weight:#3f7fb8;--master:#7fa9cf;--optimizer:#b9d0e4;--grad:#c9642a;--partial_grad:#e8964f;--feedback:#b07565;
--secondary:#6fc4bc;--unsharded:#3aa198;--activation:#b184c4;--staging:#6a6f76;--wire:#4a4f55;--torch:#efe19a;
--other:#c48fa2;--forward:#8fb4d4;--recompute:#c3d6e6;--backward:#3f74a8;--wait:#f0566f;
--unpack:#9a9183;--step:#e0d6bf;--flush:#6f4a80;--bartext:#10151a;"""

_COLOURED = (
    "weight", "master", "optimizer", "grad", "partial_grad", "feedback", "secondary", "unsharded",
    "activation", "staging", "wire", "torch", "other", "forward", "recompute", "backward", "wait",
    "unpack", "step", "flush",
)  # fmt: skip

_SAME = {
    "gather": "unsharded", "reduce_scatter": "partial_grad", "fetch": "activation",
    "average": "unpack", "await_step": "grad", "phase-forward": "forward",
    "phase-backward": "backward", "phase-step": "step", "phase-other": "other",
}  # fmt: skip

_COLOURS = "".join(
    f".{name}{{--c:var(--{colour})}}"
    for name, colour in [*((each, each) for each in _COLOURED), *_SAME.items()]
)

STYLE = (
    f":root{{{_LIGHT}color-scheme:light dark}}"
    f"@media (prefers-color-scheme:dark){{:root{{{_DARK}}}}}"
    f"@media print{{:root{{{_LIGHT}--page:#ffffff;color-scheme:light}}}}"
    + _COLOURS
    + """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,
"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;font-variant-numeric:tabular-nums}
header,main,footer{max-width:1080px;margin:0 auto;padding:0 28px}
header{padding-top:36px}
.brand{margin:0;color:var(--quiet);letter-spacing:.04em}
h1{margin:2px 0 0;font-size:30px;line-height:1.2;font-weight:650;overflow-wrap:anywhere}
header .quiet{margin:4px 0 0}
h2{margin:0;font-size:19px;font-weight:650}
h3{margin:0 0 6px;font-size:13px;font-weight:600;color:var(--quiet)}
section{margin:44px 0 0;padding-top:22px;border-top:1px solid var(--rule)}
.note{margin:4px 0 0;max-width:68ch;color:var(--quiet)}
.quiet{color:var(--quiet)}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(136px,1fr));gap:22px 24px;
margin:26px 0 0}
.figures div{border-top:2px solid var(--ink);padding-top:8px}
.figures dt{font-size:13px;color:var(--quiet)}
.figures dd{margin:0;font-size:22px;line-height:1.25;font-weight:600;white-space:nowrap}
.figures dd.quiet{font-size:13px;font-weight:400;white-space:normal}
figure{margin:18px 0 0}
figcaption{margin:0 0 4px;font-weight:600;font-size:14px}
figcaption .quiet{font-weight:400}
.chart{display:block;overflow:visible;font-size:12px;margin-left:70px;width:calc(100% - 70px)}
.chart text{fill:var(--ink)}
.chart .axis,.chart .lane,.chart .phasename{fill:var(--quiet)}
.chart .mark{paint-order:stroke;stroke:var(--page);stroke-width:3px;
stroke-linejoin:round;stroke-opacity:.8}
.chart .mark{font-weight:600}
.grid{stroke:var(--grid);stroke-width:1}
.tick,.base{stroke:var(--quiet);stroke-width:1}
.bound{stroke:var(--rule);stroke-width:1}
.phase{fill:var(--ink);fill-opacity:.025}
.phase.backward{fill-opacity:.06}
.area{fill:var(--c);stroke:var(--page);stroke-width:.75;vector-effect:non-scaling-stroke}
.peak{fill:var(--ink);stroke:var(--page);stroke-width:1.5}
.halo{fill:none;stroke:var(--page);stroke-width:4.5;stroke-opacity:.75;
vector-effect:non-scaling-stroke}
.predicted{fill:none;stroke:var(--ink);stroke-width:1.75;stroke-dasharray:6 4;
vector-effect:non-scaling-stroke}
.cursor{stroke:var(--ink);stroke-width:1;visibility:hidden}
.readout{min-height:1.5em;margin:2px 0 0 70px;font-size:13px;color:var(--quiet)}
.bar{fill:var(--c);stroke:var(--page);stroke-width:.6}
.chart .barname{fill:var(--bartext);font-size:11px;pointer-events:none}
.chart .on-backward,.chart .on-gather,.chart .on-fetch{fill:#ffffff}
.chart .on-step{fill:var(--page)}
.curve{fill:none;stroke:var(--backward);stroke-width:1.75;stroke-linejoin:round;
vector-effect:non-scaling-stroke}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(300px,1fr));gap:0 40px}
.wide{overflow-x:auto;margin-top:14px}
table{border-collapse:collapse;min-width:min(100%,420px);font-size:14px}
th,td{padding:4px 26px 4px 0;text-align:left;font-weight:400;vertical-align:baseline;
border-bottom:1px solid var(--rule)}
thead th{font-size:13px;color:var(--quiet);white-space:nowrap}
td,thead th{white-space:nowrap}
tbody th{overflow-wrap:anywhere}
.legend tbody th{padding-left:21px}
.legend .key{margin-left:-21px}
.legend .sum th{padding-left:0}
.num{text-align:right}
th:last-child,td:last-child{padding-right:0}
.sum th,.sum td{font-weight:600;border-bottom:0}
.meters{width:34%;min-width:90px}
.meterbox{display:block}
.meter{fill:var(--master)}
.key{display:inline-block;width:12px;height:12px;margin-right:9px;border-radius:2px;
background:var(--c);vertical-align:-1px}
.key.dashes{height:0;width:22px;border-radius:0;border-top:2px dashed var(--ink);
vertical-align:4px;background:none}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(240px,1fr));gap:26px 40px;
margin-top:14px}
.facts dl{display:grid;grid-template-columns:max-content 1fr;gap:3px 18px;margin:0;font-size:14px}
.facts dt{color:var(--quiet)}
.facts dd{margin:0;overflow-wrap:anywhere}
footer{margin-top:44px;padding-bottom:44px;font-size:13px;color:var(--quiet)}
code{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:.95em}
@media (max-width:699px){
body{font-size:15px}
header,main,footer{padding-left:16px;padding-right:16px}
header{padding-top:24px}
h1{font-size:24px}
.figures{grid-template-columns:repeat(2,minmax(0,1fr));gap:18px 20px}
.figures dd{font-size:18px}
.chart{font-size:11px;margin-left:58px;width:calc(100% - 58px)}
.readout{margin-left:58px}
.chart .barname{display:none}
th,td{padding-right:12px}
table{font-size:13px}
.meters,.minor{display:none}
tbody th{min-width:124px;overflow-wrap:break-word}
.legend th,.legend td{padding-right:10px}
}
@media print{
@page{margin:14mm}
body{font-size:10.5pt;-webkit-print-color-adjust:exact;print-color-adjust:exact}
header,main,footer{max-width:none;padding-left:0;padding-right:0}
header{padding-top:0}
section{margin-top:22px;padding-top:14px}
.readout{display:none}
.figures{grid-template-columns:repeat(3,1fr)}
.wide{overflow:visible}
figure,tr,.figures,.facts div{break-inside:avoid}
h2{break-after:avoid}
}
"""
)

SCRIPT = """
for (const figure of document.querySelectorAll('.memory')) {
  const told = JSON.parse(figure.querySelector('script').textContent);
  const chart = figure.querySelector('svg'), cursor = figure.querySelector('.cursor');
  const readout = figure.querySelector('.readout');
  const size = n => {
    const units = ['bytes', 'KiB', 'MiB', 'GiB', 'TiB'];
    let i = 0;
    for (; n >= 1023.5; i++) n /= 1024;
    return (i ? n.toPrecision(3) : n) + ' ' + units[i];
  };
  chart.addEventListener('pointermove', event => {
    const box = chart.getBoundingClientRect();
    const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    const at = share * told.seconds;
    let low = 0, high = told.times.length;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (at >= told.times[middle]) low = middle; else high = middle;
    }
    let sum = 0;
    const parts = told.names.map((name, i) => [name, told.layers[i][low]]);
    for (const part of parts) sum += part[1];
    cursor.setAttribute('x1', 100 * share + '%');
    cursor.setAttribute('x2', 100 * share + '%');
    cursor.style.visibility = 'visible';
    const words = parts.filter(part => part[1]).reverse();
    readout.textContent = (1e3 * at).toFixed(1) + ' ms: ' + size(sum) + ' = ' +
      words.map(part => size(part[1]) + ' ' + part[0]).join(' + ');
  });
  chart.addEventListener('pointerleave', () => {
    cursor.style.visibility = 'hidden';
    readout.textContent = '';
  });
}
"""
"""Comparisons are written so that none needs `<` or an ampersand."""
