"""How a report looks: light or dark as the reader has it, on paper, and on a phone."""

STYLE = """
:root{color-scheme:light dark;--paper:#fbfaf7;--card:#fff;--ink:#1b1d22;--soft:#565c69;--line:#dcd8cf;
--faint:#edeae2;--c0:#1f5fbf;--c1:#a34a00;--c2:#0a6e68;--c3:#7a3e9d;--c4:#8c6d00;--c5:#a1286a;
--good:#17663c;--goodback:#e6f3eb;--care:#7a4d00;--careback:#fbf1dc;--bad:#a3190f;--badback:#fdeae8}
@media(prefers-color-scheme:dark){:root{--paper:#14161a;--card:#1c1f25;--ink:#e9e7e2;--soft:#a9aeb9;
--line:#373c46;--faint:#282c34;--c0:#7db0ff;--c1:#ffa05c;--c2:#5fd0c7;--c3:#cf9df0;--c4:#dcbc55;--c5:#ff8dc0;
--good:#74d9a3;--goodback:#15301f;--care:#f0bd66;--careback:#33270f;--bad:#ff9a90;--badback:#3c1714}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--paper);color:var(--ink);font:1rem/1.6 system-ui,-apple-system,"Segoe UI",
"Helvetica Neue",Arial,sans-serif}
main,header,footer{max-width:66rem;margin:0 auto;padding:0 1.4rem}
header{padding-top:2.6rem}
.over{margin:0;color:var(--soft);font-size:.8rem;letter-spacing:.09em;text-transform:uppercase}
h1{margin:.2rem 0 .3rem;font-size:1.9rem;line-height:1.2;font-weight:650;overflow-wrap:anywhere}
h2{margin:2.8rem 0 .4rem;font-size:1.3rem;font-weight:650}
h3{margin:0 0 .2rem;font-size:1rem;font-weight:650}
p{margin:.3rem 0}
.lead{color:var(--soft);max-width:46rem;overflow-wrap:anywhere}
.banner{margin:1.3rem 0 0;padding:.9rem 1.2rem;border-radius:.6rem;border:1px solid;border-left-width:.4rem}
.banner p{margin:0;max-width:50rem}.banner strong{display:block;font-size:1.15rem}
.calm{color:var(--good);background:var(--goodback)}.care{color:var(--care);background:var(--careback)}
.alarm,.weak{color:var(--bad);background:var(--badback)}
.banner.alarm{border-width:3px;border-left-width:1rem}.banner.alarm strong{font-size:1.5rem}
.banner p{color:var(--ink)}
.void{border-top:1rem solid var(--bad)}.void .over{color:var(--bad);font-weight:700}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:.8rem;margin:1.2rem 0 0}
.tile{margin:0;padding:.7rem .9rem;background:var(--card);border:1px solid var(--line);border-radius:.6rem;
min-width:0}
.tile dt{color:var(--soft);font-size:.8rem}
.tile dd{margin:0;font-size:1.2rem;font-weight:600;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
.statement{margin:1rem 0 0;padding:0;list-style:none;background:var(--card);border:1px solid var(--line);
border-radius:.6rem;counter-reset:item}
.statement>li{display:grid;grid-template-columns:15rem minmax(0,1fr);gap:.2rem 1.6rem;padding:1rem 1.3rem;
border-top:1px solid var(--line);counter-increment:item}
.statement>li:first-child{border-top:0}
.statement h3{font-weight:500;color:var(--soft);font-size:.95rem}
.statement h3:before{content:counter(item) ". ";font-variant-numeric:tabular-nums}
.statement .value{margin:0;font-weight:650;overflow-wrap:anywhere}
.statement p{max-width:44rem;overflow-wrap:anywhere}
.mark{display:inline-block;margin-right:.5rem;padding:0 .55rem;border-radius:1rem;font-size:.8rem;
font-weight:600;border:1px solid}
.figures{columns:2;column-gap:1.2rem;margin-top:1rem}
figure{margin:0 0 1.2rem;break-inside:avoid;padding:1.1rem 1.2rem;background:var(--card);
border:1px solid var(--line);border-radius:.6rem;min-width:0}
figcaption p{color:var(--soft);font-size:.9rem;line-height:1.45;margin:0 0 .6rem;overflow-wrap:anywhere}
figure>svg{display:block;width:100%;height:auto}
svg text{font-size:12.5px;font-variant-numeric:tabular-nums}
.tick{fill:var(--soft)}.name{fill:var(--ink)}
.grid{stroke:var(--faint)}.axis{stroke:var(--soft)}.guide{stroke:var(--soft);stroke-dasharray:2 3}
.line{fill:none;stroke-width:2.2;stroke-linejoin:round;stroke-linecap:round}
.limit,.claim{stroke:var(--bad);stroke-width:2}.limit{stroke-dasharray:7 4}
.level{stroke:var(--soft);stroke-width:1.6}.l0{stroke-dasharray:8 4}.l1{stroke-dasharray:2 4}
.l2{stroke-dasharray:9 3 2 3}
.whole{fill:var(--faint);stroke:var(--line)}.bad{fill:var(--bad)}
.line.c0{stroke:var(--c0)}.line.c1{stroke:var(--c1)}.line.c2{stroke:var(--c2)}.line.c3{stroke:var(--c3)}
.line.c4{stroke:var(--c4)}.line.c5{stroke:var(--c5)}
.dot{stroke:var(--card);stroke-width:1}.bar.c0,.dot.c0{fill:var(--c0)}.dot.c1{fill:var(--c1)}
.dot.c2{fill:var(--c2)}.dot.c3{fill:var(--c3)}.dot.c4{fill:var(--c4)}.dot.c5{fill:var(--c5)}
.area.c0{fill:var(--c0);opacity:.13}
.legend{display:flex;flex-wrap:wrap;gap:.15rem 1.2rem;margin:.5rem 0 0;padding:0;list-style:none;
font-size:.85rem;color:var(--soft)}
.legend li{min-width:0;overflow-wrap:anywhere}
.swatch{width:28px;height:14px;vertical-align:-2px;margin-right:.15rem}
details{margin-top:.6rem;font-size:.85rem}summary{cursor:pointer;color:var(--soft)}
.scroll{overflow-x:auto;margin:.5rem 0;border:1px solid var(--line);border-radius:.5rem;
background:var(--card)}
.scroll:focus-visible{outline:2px solid var(--c0)}
table{width:100%;border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums}
th,td{padding:.4rem .8rem;text-align:left;border-top:1px solid var(--line);vertical-align:top}
thead th{border-top:0;color:var(--soft);font-weight:500}
.n{text-align:right}.ledger td,.ledger th{white-space:nowrap}
.ledger td:nth-child(4){white-space:normal;min-width:15rem;overflow-wrap:anywhere}
code{font:.95em ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;overflow-wrap:anywhere}
tr.broken td{color:var(--bad);font-weight:600}
.audit h2{margin-top:0;font-size:1rem}
footer{margin-top:3rem;padding-bottom:3rem;color:var(--soft);font-size:.85rem;overflow-wrap:anywhere}
@media(max-width:56rem){.figures{columns:1}figure{max-width:40rem}
.statement>li{grid-template-columns:minmax(0,1fr)}}
@media(max-width:30rem){main,header,footer{padding:0 .9rem}header{padding-top:1.4rem}h1{font-size:1.5rem}
.tiles{grid-template-columns:repeat(2,minmax(0,1fr));gap:.6rem}.statement>li{padding:.8rem .9rem}
figure{padding:.9rem .8rem}svg text{font-size:14px}
.ledger td:nth-child(2),.ledger th:nth-child(2){display:none}th,td{padding:.4rem .6rem}}
@media print{:root{color-scheme:light;--paper:#fff;--card:#fff;--ink:#000;--soft:#444;--line:#bbb;
--faint:#eee;--c0:#1f5fbf;--c1:#a34a00;--c2:#0a6e68;--c3:#7a3e9d;--c4:#8c6d00;--c5:#a1286a;--good:#17663c;
--goodback:#fff;--care:#7a4d00;--careback:#fff;--bad:#a3190f;--badback:#fff}
@page{margin:16mm 14mm}html{font-size:13px}main,header,footer{max-width:none;padding:0}header{padding:0}
h2{margin-top:1.6rem;break-after:avoid}h3{break-after:avoid}
figure,.statement>li,.tile,.banner,tr{break-inside:avoid}
.figures{columns:2;column-gap:.6rem}figure{margin-bottom:.6rem}figure details{display:none}
.statement>li{display:block;padding:.5rem .8rem}.statement h3{float:left;width:11rem}
.statement>li>div{margin-left:12rem}.scroll{overflow:visible}
.tiles{grid-template-columns:repeat(4,minmax(0,1fr))}
.bar,.dot,.whole,.area,.bad{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
"""
