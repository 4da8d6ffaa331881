"""The report's style sheet: light and dark as the reader's system is; wide plots and tables scroll in their frames."""

STYLE = """
:root { color-scheme: light dark;
  --paper: #fff; --ink: #1a1d21; --soft: #5a626c; --rule: #d5dae0; --tint: #f3f5f7; --warn: #fdf1e3;
  --s0: #0072b2; --s1: #d55e00; --s2: #009e73; --s3: #b0548c; --s4: #8a6d00; --s5: #3aa0d8; --s6: #7a5fb5;
  --b0: #7d8590; --b1: #30363d; --b2: #57606a; --b3: #9aa4af;
  --dense: #9aa7b4; --expert: #0072b2; --control: #7a5fb5; --wait: #f6d5c6; --demand: #d55e00; --ahead: #009e73;
  --predict: #8a6d00; --on-bar: #fff; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #14171a; --ink: #e6e9ec; --soft: #a2abb5; --rule: #343a41; --tint: #1d2126; --warn: #3a2c1a;
  --s0: #4fb0e8; --s1: #f08a3c; --s2: #35c79c; --s3: #e39ac5; --s4: #dcc04e; --s5: #9bd3f5; --s6: #b7a3e6;
  --b0: #9aa4af; --b1: #f0f3f6; --b2: #c3cad2; --b3: #6e7781;
  --dense: #5a6673; --expert: #4fb0e8; --control: #b7a3e6; --wait: #5b3626; --demand: #f08a3c; --ahead: #35c79c;
  --predict: #dcc04e; --on-bar: #14171a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 16px; max-width: 1320px; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 8px 0; }
h2 { font-size: 1.2rem; margin: 40px 0 8px; padding-top: 12px; border-top: 1px solid var(--rule); }
h3 { font-size: 1rem; margin: 20px 0 4px; }
p, li { max-width: 78ch; }
.soft, figcaption { color: var(--soft); font-size: 0.9rem; }
.headline { padding: 4px 16px; background: var(--tint); border-left: 4px solid var(--s0); }
.headline li { margin: 8px 0; }
.headline ul { padding-left: 1.1em; }
.failures { padding: 4px 16px; background: var(--warn); border-left: 4px solid var(--s1); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.875rem; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { padding: 4px 6px; text-align: right; border-bottom: 1px solid var(--rule); }
th { font-weight: 600; white-space: normal; overflow-wrap: normal; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: var(--paper); }
thead th[colspan] { text-align: center; border-left: 1px solid var(--rule); }
td.first, th.first { border-left: 1px solid var(--rule); }
tr.bound { color: var(--soft); }
tr.best td { font-weight: 700; }
td small { display: block; line-height: 1.2; color: var(--soft); font-weight: 400; }
.charts { display: grid; grid-template-columns: 1fr; gap: 16px 24px; max-width: 900px; }
@media (min-width: 720px) { .charts { grid-template-columns: 1fr 1fr; } }
figure { margin: 0; min-width: 0; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg.wide { min-width: 960px; }
svg text { font: 11px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: var(--soft); }
svg .name { font-size: 12.5px; font-weight: 600; fill: var(--ink); }
svg .end { text-anchor: end; } svg .middle { text-anchor: middle; }
.grid { stroke: var(--rule); stroke-width: 0.6; } .axis { stroke: var(--soft); stroke-width: 1; }
.line { fill: none; stroke: var(--c); stroke-width: 1.8; stroke-linejoin: round; }
.dot { fill: var(--c); } .hole { fill: var(--paper); stroke: var(--c); stroke-width: 1.8; }
.spread { stroke: var(--c); stroke-width: 4; opacity: 0.35; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; list-style: none; margin: 8px 0; padding: 0;
  font-size: 0.9rem; }
.legend svg { display: inline-block; width: 32px; height: 14px; vertical-align: -2px; }
.legend i { display: inline-block; width: 14px; height: 14px; vertical-align: -2px; border-radius: 2px; }
.k-dense { fill: var(--dense); background: var(--dense); }
.k-expert { fill: var(--expert); background: var(--expert); }
.k-control { fill: var(--control); background: var(--control); }
.k-wait { fill: var(--wait); background: var(--wait); }
.k-demand { fill: var(--demand); background: var(--demand); }
.k-ahead { fill: var(--ahead); background: var(--ahead); }
.k-predict { fill: var(--predict); background: var(--predict); }
rect.k-demand, rect.k-ahead { stroke: var(--paper); stroke-width: 0.5; }
svg .in-bar { fill: var(--on-bar); text-anchor: middle; font-size: 10px; }
code, pre { font: 0.85rem/1.45 ui-monospace, SFMono-Regular, Menlo, monospace; }
pre { padding: 12px; background: var(--tint); white-space: pre-wrap; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 16px; font-size: 0.9rem; }
dt { color: var(--soft); } dd { margin: 0; }
@media (max-width: 600px) { body { padding: 12px; }
  dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: 8px; } }
@media print { .scroll { overflow: visible; } }
"""
