//! `kiln bench MODEL --plot out.svg`: the measurements as one picture. It has its own background, light or dark as the reader's
//! programs are, and needs nothing but a browser to be looked at.

use std::fmt::Write as _;

use super::rate;

/// What kind of step something is: its colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Product,
    Attention,
    Other,
}

impl Kind {
    /// The kind of an operation.
    pub(super) fn of(operation: &str) -> Kind {
        match operation {
            "mul_mat_vec" | "mul_mm" => Kind::Product,
            "flash_attention" | "kv_write" | "rope" | "set_rows" | "key_mix" | "head_mix" => Kind::Attention,
            _ => Kind::Other,
        }
    }

    fn class(self) -> &'static str {
        match self {
            Kind::Product => "product",
            Kind::Attention => "attention",
            Kind::Other => "other",
        }
    }
}

/// Steps that differ in their layer alone, in one run.
#[derive(Clone, Debug)]
pub(super) struct Bar {
    pub(super) name: String,
    pub(super) kind: Kind,
    pub(super) count: usize,
    pub(super) seconds: f64,
    pub(super) bytes: f64,
    pub(super) flops: f64,
}

/// One step of a token.
#[derive(Clone, Debug)]
pub(super) struct Span {
    pub(super) name: String,
    pub(super) kind: Kind,
    pub(super) start: f64,
    pub(super) seconds: f64,
}

/// One test with its steps.
#[derive(Clone, Debug)]
pub(super) struct Test {
    pub(super) name: String,
    pub(super) rate: f64,
    pub(super) bars: Vec<Bar>,
    /// Its steps one after the other, where it is one token.
    pub(super) spans: Vec<Span>,
}

/// Everything that is drawn.
#[derive(Clone, Debug)]
pub(super) struct Picture {
    pub(super) title: String,
    pub(super) subtitle: String,
    pub(super) tests: Vec<Test>,
    /// Bytes a second.
    pub(super) read: Option<f64>,
    /// Operations a second, by name.
    pub(super) arithmetic: Vec<(String, f64)>,
    /// Texts at once, with the tokens a second of all together.
    pub(super) batches: Vec<(usize, f64)>,
}

const WIDTH: f64 = 1240.0;
const MARGIN: f64 = 30.0;
const TOP: f64 = 84.0;
/// A panel with what is written around its axes.
const PANEL: [f64; 2] = [580.0, 400.0];
/// Bars that are shown; what is left is one more.
const MOST_BARS: usize = 12;

const STYLE: &str = "<style>\
text{font-family:system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;font-size:12px;fill:#333}\
.ground{fill:#fff}.title{font-size:20px;font-weight:600}.head{font-size:15px;font-weight:600}.dim{fill:#666}.small{font-size:11px}\
.end{text-anchor:end}.middle{text-anchor:middle}\
.axis{stroke:#666;fill:none}.grid{stroke:#000;stroke-opacity:.09;fill:none}.roof{stroke:#444;stroke-width:2;fill:none}\
.curve{stroke:#4477aa;stroke-width:2.5;fill:none}.ideal{stroke:#666;stroke-dasharray:4 4;fill:none}\
.product{fill:#4477aa}.attention{fill:#d05a6e}.other{fill:#3c9a54}.hollow{fill-opacity:.35;stroke-width:1.5}\
.product.hollow{stroke:#4477aa}.attention.hollow{stroke:#d05a6e}.other.hollow{stroke:#3c9a54}\
@media (prefers-color-scheme:dark){text{fill:#ddd}.ground{fill:#17191d}.dim{fill:#a5a5a5}.axis{stroke:#999}\
.grid{stroke:#fff;stroke-opacity:.12}.roof{stroke:#ccc}.ideal{stroke:#999}.curve{stroke:#7aa6d8}\
.product{fill:#6699cc}.attention{fill:#e07a8b}.other{fill:#58b873}}\
</style>";

/// Text inside of SVG.
fn escaped(text: &str) -> String {
    let plain = |c: char| if c.is_control() { ' ' } else { c };
    text.chars().map(plain).collect::<String>().replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// As much of a text as fits.
fn cut(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}

/// A number without more digits than people read.
fn short(value: f64) -> String {
    match value {
        v if v >= 1e12 => format!("{}T", digits(v / 1e12)),
        v if v >= 1e9 => format!("{}G", digits(v / 1e9)),
        v if v >= 1e6 => format!("{}M", digits(v / 1e6)),
        v if v >= 1e3 => format!("{}k", digits(v / 1e3)),
        v => digits(v),
    }
}

fn digits(value: f64) -> String {
    match value {
        v if v >= 99.5 || v == v.round() => format!("{v:.0}"),
        v if v >= 9.95 => format!("{v:.1}"),
        v => format!("{v:.2}"),
    }
}

/// Milliseconds or microseconds.
fn time(seconds: f64) -> String {
    if seconds >= 1e-3 { format!("{} ms", digits(1e3 * seconds)) } else { format!("{} us", digits(1e6 * seconds)) }
}

/// A scale from values to places on the picture.
#[derive(Clone, Copy)]
struct Scale {
    from: [f64; 2],
    to: [f64; 2],
    logarithmic: bool,
}

impl Scale {
    fn at(&self, value: f64) -> f64 {
        let of = |v: f64| if self.logarithmic { v.max(1e-300).log10() } else { v };
        let [low, high] = self.from.map(of);
        let share = (of(value) - low) / (high - low).max(1e-12);
        self.to[0] + share * (self.to[1] - self.to[0])
    }

    /// Where lines of a grid stand.
    fn ticks(&self) -> Vec<f64> {
        let [low, high] = self.from;
        if self.logarithmic {
            let (first, last) = (low.log10().ceil() as i32, high.log10().floor() as i32);
            let every = ((last - first) / 7).max(0) as usize + 1;
            return (first..=last).step_by(every).map(|e| 10f64.powi(e)).collect();
        }
        let rough = (high - low) / 5.0;
        let magnitude = 10f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].into_iter().map(|n| n * magnitude).find(|s| *s >= rough).unwrap_or(rough);
        let first = (low / step).ceil() as i64;
        (first..).map(|i| i as f64 * step).take_while(|v| *v <= high * 1.000_001).collect()
    }
}

/// Puts a picture together.
struct Drawing {
    out: String,
}

impl Drawing {
    fn text(&mut self, [x, y]: [f64; 2], class: &str, text: &str) {
        let _ = writeln!(self.out, "<text x=\"{x:.1}\" y=\"{y:.1}\" class=\"{class}\">{}</text>", escaped(text));
    }

    fn line(&mut self, class: &str, points: &[[f64; 2]]) {
        let points: Vec<String> = points.iter().map(|[x, y]| format!("{x:.1},{y:.1}")).collect();
        let _ = writeln!(self.out, "<polyline class=\"{class}\" points=\"{}\"/>", points.join(" "));
    }

    /// A rectangle that says more where the pointer rests on it.
    fn block(&mut self, class: &str, [x, y]: [f64; 2], [width, height]: [f64; 2], about: &str) {
        let about = escaped(about);
        let _ = writeln!(
            self.out,
            "<rect x=\"{x:.2}\" y=\"{y:.1}\" width=\"{:.2}\" height=\"{height:.1}\" class=\"{class}\"><title>{about}</title></rect>",
            width.max(0.4)
        );
    }

    fn dot(&mut self, class: &str, [x, y]: [f64; 2], radius: f64, about: &str) {
        let about = escaped(about);
        let _ = writeln!(
            self.out,
            "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{radius:.1}\" class=\"{class}\"><title>{about}</title></circle>"
        );
    }

    /// Both axes of a panel with their grid.
    fn axes(&mut self, x: &Scale, y: &Scale, names: [&str; 2], x_ticks: Option<&[f64]>) {
        let ([left, right], [bottom, top]) = (x.to, y.to);
        let own = x.ticks();
        for tick in x_ticks.unwrap_or(&own) {
            let at = x.at(*tick);
            self.line("grid", &[[at, bottom], [at, top]]);
            self.text([at, bottom + 16.0], "dim middle small", &short(*tick));
        }
        for tick in y.ticks() {
            let at = y.at(tick);
            self.line("grid", &[[left, at], [right, at]]);
            self.text([left - 6.0, at + 4.0], "dim end small", &short(tick));
        }
        self.line("axis", &[[left, top], [left, bottom], [right, bottom]]);
        self.text([right, bottom + 34.0], "dim end", names[0]);
        self.text([left - 40.0, top - 10.0], "dim", names[1]);
    }
}

/// The corner of panel number `n`: two in a row.
fn corner(n: usize) -> [f64; 2] {
    [MARGIN + (n % 2) as f64 * (PANEL[0] + 20.0), TOP + (n / 2) as f64 * (PANEL[1] + 24.0)]
}

/// The picture.
pub(super) fn svg(picture: &Picture) -> String {
    let height = TOP + 2.0 * (PANEL[1] + 24.0);
    let mut drawing = Drawing { out: String::new() };
    let _ = writeln!(
        drawing.out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\">{STYLE}\n\
         <rect class=\"ground\" width=\"{WIDTH}\" height=\"{height}\"/>"
    );
    drawing.text([MARGIN, 34.0], "title", &cut(&picture.title, 80));
    drawing.text([MARGIN, 56.0], "dim", &cut(&picture.subtitle, 170));
    let mut x = WIDTH - MARGIN - 350.0;
    for (kind, name) in
        [(Kind::Product, "matrix products"), (Kind::Attention, "attention"), (Kind::Other, "other steps")]
    {
        drawing.block(kind.class(), [x, 24.0], [12.0, 12.0], name);
        drawing.text([x + 18.0, 34.0], "dim", name);
        x += 130.0;
    }
    roofline(&mut drawing, picture, corner(0));
    bars(&mut drawing, picture, corner(1));
    batches(&mut drawing, picture, corner(2));
    timeline(&mut drawing, picture, corner(3));
    drawing.out + "</svg>\n"
}

/// How near each kind of step comes to what memory and arithmetic allow.
fn roofline(drawing: &mut Drawing, picture: &Picture, [x, y]: [f64; 2]) {
    drawing.text([x, y + 16.0], "head", "Roofline: how near steps come to what is possible");
    let points =
        || picture.tests.iter().flat_map(|t| &t.bars).filter(|b| b.flops > 0.0 && b.bytes > 0.0 && b.seconds > 0.0);
    let Some(read) = picture.read.filter(|_| points().next().is_some()) else {
        return drawing.text([x, y + 60.0], "dim", "the speed of this memory is not known");
    };
    let roof = picture.arithmetic.iter().map(|(_, rate)| *rate).fold(0.0, f64::max);
    let bounds = |of: &dyn Fn(&Bar) -> f64, more: [f64; 2]| {
        let values = points().map(of).chain(more.into_iter().filter(|v| *v > 0.0));
        values.fold([f64::INFINITY, 0.0], |[low, high], v: f64| [low.min(v), high.max(v)])
    };
    let [low, high] = bounds(&|b| b.flops / b.bytes, [2.0 * roof / read, 0.0]);
    let [slow, fast] = bounds(&|b| b.flops / b.seconds, [roof, 0.0]);
    let across = Scale { from: [low / 2.0, high * 2.0], to: [x + 46.0, x + PANEL[0] - 10.0], logarithmic: true };
    let up = Scale { from: [slow / 2.0, fast * 2.5], to: [y + PANEL[1] - 40.0, y + 70.0], logarithmic: true };
    drawing.axes(&across, &up, ["operations for each byte that must be moved", "operations/s"], None);
    let [left, right] = across.from;
    // The slanted part of the roof begins where the panel does.
    let start = left.max(up.from[0] / read);
    let mut below: Vec<(String, f64)> = picture.arithmetic.clone();
    below.sort_by(|a, b| b.1.total_cmp(&a.1));
    let corner = if roof > 0.0 { (roof / read).min(right) } else { right };
    drawing.line("roof", &[[across.at(start), up.at(start * read)], [across.at(corner), up.at(corner * read)]]);
    drawing.text(
        [across.at(start) + 12.0, up.at(start * read) + 18.0],
        "dim small",
        &format!("memory: {}", rate(read, "B")),
    );
    for (name, rate_of) in below.iter().filter(|(_, rate)| *rate > up.from[0]) {
        drawing.line(
            "roof",
            &[[across.at((rate_of / read).min(right)), up.at(*rate_of)], [across.at(right), up.at(*rate_of)]],
        );
        let label = format!("{name}: {}", rate(*rate_of, "OP"));
        drawing.text([across.at(right), up.at(*rate_of) - 6.0], "dim small end", &label);
    }
    for (nth, test) in picture.tests.iter().enumerate() {
        let all: f64 = test.bars.iter().map(|b| b.seconds).sum();
        for bar in test.bars.iter().filter(|b| b.flops > 0.0 && b.bytes > 0.0 && b.seconds > 0.0) {
            let at = [across.at(bar.flops / bar.bytes), up.at(bar.flops / bar.seconds)];
            let share = bar.seconds / all;
            let about = format!(
                "{} of {}: {:.1} % of the time, {}",
                bar.name,
                test.name,
                100.0 * share,
                rate(bar.bytes / bar.seconds, "B")
            );
            let class = format!("{}{}", bar.kind.class(), if nth == 0 { "" } else { " hollow" });
            drawing.dot(&class, at, 3.0 + 14.0 * share.sqrt(), &about);
        }
    }
    let names: Vec<&str> = picture.tests.iter().map(|t| t.name.as_str()).collect();
    if let [full, hollow, ..] = names[..] {
        let about = format!("full: {full}, pale: {hollow}; the area is the share of time");
        drawing.text([x, y + 34.0], "dim small", &about);
    }
}

/// Where the time of the last test goes.
fn bars(drawing: &mut Drawing, picture: &Picture, [x, y]: [f64; 2]) {
    let Some(test) = picture.tests.last() else { return };
    let all: f64 = test.bars.iter().map(|b| b.seconds).sum();
    let head = format!("Where the time of {} goes: {} in steps", test.name, time(all));
    drawing.text([x, y + 16.0], "head", &head);
    let mut shown: Vec<Bar> = test.bars.iter().take(MOST_BARS).cloned().collect();
    let rest = &test.bars[shown.len()..];
    if !rest.is_empty() {
        let sum = |of: fn(&Bar) -> f64| rest.iter().map(of).sum::<f64>();
        let (seconds, bytes, count) = (sum(|b| b.seconds), sum(|b| b.bytes), rest.iter().map(|b| b.count).sum());
        let name = format!("{} more kinds", rest.len());
        shown.push(Bar { name, kind: Kind::Other, count, seconds, bytes, flops: 0.0 });
    }
    let (left, width) = (x + 190.0, PANEL[0] - 190.0 - 175.0);
    let most = shown.iter().map(|b| b.seconds).fold(1e-12, f64::max);
    let row = ((PANEL[1] - 50.0) / shown.len().max(8) as f64).min(30.0);
    for (i, bar) in shown.iter().enumerate() {
        let top = y + 36.0 + i as f64 * row;
        let middle = top + 0.5 * row + 3.0;
        let name = if bar.count > 1 { format!("{} x {}", cut(&bar.name, 22), bar.count) } else { cut(&bar.name, 28) };
        drawing.text([left - 8.0, middle], "end small", &name);
        let length = width * bar.seconds / most;
        drawing.block(
            bar.kind.class(),
            [left, top + 2.0],
            [length, row - 6.0],
            &format!("{}: {}", bar.name, time(bar.seconds)),
        );
        let moved = bar.bytes / bar.seconds.max(1e-12);
        let of_read = picture.read.map(|read| format!(", {:.0} % of memory", 100.0 * moved / read)).unwrap_or_default();
        let says = format!("{} ({:.0} %{of_read})", time(bar.seconds), 100.0 * bar.seconds / all);
        drawing.text([left + length + 6.0, middle], "dim small", &says);
    }
}

/// Tokens per second at each batch size.
fn batches(drawing: &mut Drawing, picture: &Picture, [x, y]: [f64; 2]) {
    drawing.text([x, y + 16.0], "head", "Texts written together");
    let (Some(first), Some(last)) = (picture.batches.first(), picture.batches.last()) else {
        return drawing.text([x, y + 60.0], "dim", "not measured");
    };
    let most = picture.batches.iter().map(|(_, rate)| *rate).fold(0.0, f64::max);
    let across = Scale {
        from: [first.0 as f64 / 1.15, last.0 as f64 * 1.25],
        to: [x + 46.0, x + PANEL[0] - 10.0],
        logarithmic: true,
    };
    let up = Scale { from: [0.0, most * 1.15], to: [y + PANEL[1] - 40.0, y + 70.0], logarithmic: false };
    let ticks: Vec<f64> = picture.batches.iter().map(|(n, _)| *n as f64).collect();
    drawing.axes(&across, &up, ["texts at once", "tokens/s of all"], Some(&ticks));
    // As if others cost nothing: as far as the panel reaches.
    let one = first.1 / first.0 as f64;
    let reach = (most * 1.15 / one).min(last.0 as f64);
    let steps = 40;
    let ideal = (0..=steps).map(|i| first.0 as f64 * (reach / first.0 as f64).powf(f64::from(i) / f64::from(steps)));
    let ideal: Vec<[f64; 2]> = ideal.map(|n| [across.at(n), up.at(n * one)]).collect();
    drawing.line("ideal", &ideal);
    let points: Vec<[f64; 2]> = picture.batches.iter().map(|(n, rate)| [across.at(*n as f64), up.at(*rate)]).collect();
    drawing.line("curve", &points);
    for ((n, rate), at) in picture.batches.iter().zip(&points) {
        drawing.dot("product", *at, 4.0, &format!("{n} texts: {rate:.1} tokens/s"));
        drawing.text([at[0], at[1] - 10.0], "small middle", &digits(*rate));
    }
    drawing.text([x, y + 34.0], "dim small", "dashed: if each text more cost nothing");
}

/// The steps of one token, one after the other.
fn timeline(drawing: &mut Drawing, picture: &Picture, [x, y]: [f64; 2]) {
    let Some(test) = picture.tests.iter().rev().find(|t| !t.spans.is_empty()) else {
        return drawing.text([x, y + 16.0], "head", "One token, step by step: not measured");
    };
    let end = test.spans.iter().map(|s| s.start + s.seconds).fold(0.0, f64::max);
    let head = format!("One token, step by step: {} steps in {}", test.spans.len(), time(end));
    drawing.text([x, y + 16.0], "head", &head);
    // A row for each of the longest kinds, one for all others.
    let names: Vec<&str> = test.bars.iter().take(MOST_BARS - 1).map(|b| b.name.as_str()).collect();
    let left = x + 150.0;
    let across = Scale { from: [0.0, 1e3 * end.max(1e-9)], to: [left, x + PANEL[0] - 10.0], logarithmic: false };
    let rows = names.len() + usize::from(test.bars.len() > names.len());
    let row = ((PANEL[1] - 86.0) / rows.max(1) as f64).min(28.0);
    let (top, bottom) = (y + 36.0, y + 36.0 + row * rows as f64);
    for tick in across.ticks() {
        drawing.line("grid", &[[across.at(tick), top], [across.at(tick), bottom]]);
        drawing.text([across.at(tick), bottom + 16.0], "dim middle small", &digits(tick));
    }
    drawing.line("axis", &[[left, top], [left, bottom], [x + PANEL[0] - 10.0, bottom]]);
    drawing.text([x + PANEL[0] - 10.0, bottom + 34.0], "dim end", "milliseconds");
    for i in 0..rows {
        let name = names.get(i).map_or_else(|| "others".to_owned(), |name| cut(name, 22));
        drawing.text([left - 8.0, top + (i as f64 + 0.5) * row + 4.0], "end small", &name);
    }
    for span in &test.spans {
        let at = names.iter().position(|name| *name == plain(&span.name)).unwrap_or(names.len());
        let from = across.at(1e3 * span.start);
        let width = across.at(1e3 * (span.start + span.seconds)) - from;
        let place = [from, top + at as f64 * row + 3.0];
        drawing.block(span.kind.class(), place, [width, row - 6.0], &format!("{}: {}", span.name, time(span.seconds)));
    }
}

/// A label without its layer.
pub(super) fn plain(label: &str) -> &str {
    match label.split_once('.') {
        Some((layer, rest)) if layer.bytes().all(|b| b.is_ascii_digit()) => rest,
        _ => label,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picture() -> Picture {
        let bar = |name: &str, kind, seconds: f64| Bar {
            name: name.into(),
            kind,
            count: 2,
            seconds,
            bytes: 1e9 * seconds,
            flops: 4e9 * seconds,
        };
        let span = |i: usize| Span {
            name: format!("{i}.ffn <&>"),
            kind: Kind::Product,
            start: 1e-3 * i as f64,
            seconds: 1e-3,
        };
        let bars = vec![bar("ffn <&>", Kind::Product, 0.01), bar("attention", Kind::Attention, 0.005)];
        Picture {
            title: "a \u{1b}[1m model".into(),
            subtitle: "on a <device>".into(),
            tests: vec![
                Test { name: "pp8".into(), rate: 10.0, bars: bars.clone(), spans: Vec::new() },
                Test { name: "tg4".into(), rate: 5.0, bars, spans: (0..4).map(span).collect() },
            ],
            read: Some(2e9),
            arithmetic: vec![("multiply-add".into(), 1e11)],
            batches: vec![(1, 5.0), (2, 9.0), (4, 15.0)],
        }
    }

    /// Every element that is opened is closed, and nothing of others is an element.
    #[test]
    fn the_picture_is_well_formed_and_has_every_panel() {
        let mut less = picture();
        (less.read, less.arithmetic, less.batches) = (None, Vec::new(), Vec::new());
        less.tests.iter_mut().for_each(|t| t.spans.clear());
        for picture in [picture(), less] {
            let text = svg(&picture);
            for element in ["svg", "text", "title", "style", "rect", "circle"] {
                let opened =
                    text.matches(&format!("<{element} ")).count() + text.matches(&format!("<{element}>")).count();
                let closed = text.matches(&format!("</{element}>")).count();
                let alone = text.lines().filter(|l| l.contains(&format!("<{element} ")) && l.ends_with("/>")).count();
                assert_eq!(opened, closed + alone, "{element}: {text}");
            }
            assert!(
                !text.contains('\u{1b}')
                    && !text.contains("<device>")
                    && !text.contains("NaN")
                    && !text.contains("inf")
            );
            for head in ["Roofline", "Where the time of tg4 goes", "Texts written together", "One token"] {
                assert!(text.contains(head), "{head}");
            }
        }
        let text = svg(&picture());
        assert_eq!(text.matches("<circle").count(), 4 + 3, "a dot for each kind of each test, one for each width");
        assert!(text.contains("4 steps in 4 ms") && text.contains("memory: 2.0 GB/s"), "{text}");
    }

    #[test]
    fn scales_have_ticks_that_read_well() {
        let linear = Scale { from: [0.0, 47.0], to: [0.0, 100.0], logarithmic: false };
        assert_eq!(linear.ticks(), [0.0, 10.0, 20.0, 30.0, 40.0]);
        let logarithmic = Scale { from: [0.5, 2000.0], to: [0.0, 100.0], logarithmic: true };
        assert_eq!(logarithmic.ticks(), [1.0, 10.0, 100.0, 1000.0]);
        assert!((logarithmic.at(0.5), logarithmic.at(2000.0)) == (0.0, 100.0));
        assert_eq!([short(1500.0), short(2.5e12), short(0.25), short(1e6)], ["1.50k", "2.50T", "0.25", "1M"]);
    }
}
