//! Which pictures a record's file gives, by the columns it has.

use super::figure::{Axis, Bars, Content, Figure, Mark, Panel, Series};
use super::scale::Scale;
use super::table::{Row, Table};

/// What a file's columns say that it is, and the program that wrote it where the file does not say.
struct Kind {
    columns: &'static [&'static str],
    command: &'static str,
    draw: fn(&Table) -> Vec<Figure>,
}

const KINDS: [Kind; 6] = [
    Kind {
        columns: &["what", "engine", "strategy", "value", "flat", "ratio"],
        command: "maru-transfer",
        draw: engine,
    },
    Kind {
        columns: &["what", "mover", "value", "flat", "ratio"],
        command: "maru-kernel-cuda-staged",
        draw: staged,
    },
    Kind {
        columns: &["load", "mover", "slowdown", "gbps", "flat_gbps"],
        command: "maru-kernel-cuda-interference",
        draw: interference,
    },
    Kind {
        columns: &["profile", "slots", "blocks", "launch", "ratio"],
        command: "maru-kernel-cuda-direct",
        draw: direct,
    },
    Kind {
        columns: &["profile", "blocks", "layers", "slab", "ratio"],
        command: "maru-fallback-fallback_device",
        draw: fallback,
    },
    Kind {
        columns: &["device", "tokens", "mover", "gbps", "flat_gbps", "threads"],
        command: "maru bench",
        draw: command_line,
    },
];

/// The file's pictures, or nothing if its columns are not known. `device` is what the record is of.
pub(super) fn figures(table: &Table, device: &str) -> Option<Vec<Figure>> {
    let kind = KINDS.iter().find(|kind| table.has(kind.columns))?;
    let device = table.note("device").unwrap_or(device);
    let command = table.note("command").unwrap_or(kind.command);
    let mut figures = (kind.draw)(table);
    for figure in &mut figures {
        figure.origin = format!("{device}; {}; {command}", table.date);
    }
    figures.retain(|figure| match &figure.content {
        Content::Panels(_, panels) => !panels.is_empty(),
        Content::Bars(bars) => bars.iter().any(|bars| !bars.groups.is_empty()),
    });
    Some(figures)
}

fn figure(name: &str, title: impl Into<String>, content: Content) -> Figure {
    Figure { name: name.to_owned(), title: title.into(), origin: String::new(), content }
}

fn axis(label: &str, scale: Scale) -> Axis {
    Axis { label: label.to_owned(), scale }
}

/// `H2D` and `D2H` as the benches say it, and as people do.
const DIRECTIONS: [(&str, &str); 2] = [("H2D", "load (H2D)"), ("D2H", "store (D2H)")];

/// Series by name, in the order in which names come.
#[derive(Default)]
struct Lines(Vec<Series>);

impl Lines {
    fn add(&mut self, name: &str, mark: Mark, point: (f64, f64)) {
        match self.0.iter_mut().find(|series| series.name == name) {
            // The flat copy stands in every row of a size.
            Some(series) if series.points.last() == Some(&point) => {}
            Some(series) => series.points.push(point),
            None => self.0.push(Series { name: name.to_owned(), points: vec![point], mark }),
        }
    }
}

/// Groups of bars by label, in the order in which labels come.
#[derive(Default)]
struct Groups(Vec<(String, Vec<(String, f64)>)>);

impl Groups {
    fn add(&mut self, label: String, name: &str, value: f64) {
        let bar = (name.to_owned(), value);
        match self.0.iter_mut().find(|(known, _)| *known == label) {
            Some((_, bars)) => bars.push(bar),
            None => self.0.push((label, vec![bar])),
        }
    }

    fn ratios(self, direction: &str) -> Bars {
        Bars {
            title: format!("{direction}: throughput over the flat copy's"),
            groups: self.0,
            most: 1.0,
            digits: 3,
            marks: vec![0.5, 0.9, 0.98],
        }
    }
}

/// All different values of a column, in their order.
fn values<'a>(rows: impl Iterator<Item = Row<'a>>, column: &str) -> Vec<&'a str> {
    let mut found = Vec::new();
    for row in rows {
        if !found.contains(&row.text(column)) {
            found.push(row.text(column));
        }
    }
    found
}

fn place(row: Row<'_>) -> String {
    format!("{} {}", row.text("profile"), row.text("layout"))
}

fn engine(table: &Table) -> Vec<Figure> {
    let mut figures = by_size(table, "size", "engine");
    figures.extend(cpu(table));
    figures.extend(by_profile(table, "engine"));
    figures.extend(layers(table));
    figures
}

fn staged(table: &Table) -> Vec<Figure> {
    let mut figures = by_size(table, "latency", "mover");
    figures.extend(by_profile(table, "mover"));
    figures
}

/// Throughput and latency by size, from rows of microseconds.
fn by_size(table: &Table, what: &str, who: &str) -> Vec<Figure> {
    let (mut rates, mut times) = (Vec::new(), Vec::new());
    let (mut ratios, mut of) = (Vec::new(), String::new());
    for (direction, word) in DIRECTIONS {
        let rows = || table.rows().filter(|r| r.text("what") == what && r.text("direction") == direction);
        let (mut rate, mut time, mut ratio) = (Lines::default(), Lines::default(), Lines::default());
        for row in rows() {
            let numbers = (row.number("bytes"), row.number("value"), row.number("flat"));
            let (Some(bytes), Some(value), Some(flat)) = numbers else { continue };
            of = place(row);
            for (name, value) in [("flat copy", flat), (row.text(who), value)] {
                rate.add(name, Mark::LineAndPoints, (bytes, bytes / value / 1e3));
                time.add(name, Mark::LineAndPoints, (bytes, value));
                ratio.add(name, Mark::LineAndPoints, (bytes, value / flat));
            }
        }
        if rate.0.is_empty() {
            continue;
        }
        // The engine's sizes begin with a token.
        let least = rate.0.iter().flat_map(|s| &s.points).map(|p| p.0).fold(f64::INFINITY, f64::min);
        let x = match what {
            "size" => format!("bytes of one transfer, {} KiB a token", least / 1024.0),
            _ => "bytes of one transfer".to_owned(),
        };
        let panel = |y: Axis, lines: Lines, marks| Panel {
            title: word.to_owned(),
            x: axis(&x, Scale::Bytes),
            y,
            series: lines.0,
            marks,
        };
        rates.push(panel(axis("GB/s", Scale::Upwards(0.0, 0.0)), rate, vec![]));
        times.push(panel(axis("us, host clock", Scale::Log), time, vec![]));
        let marks = vec![(1.1, "1.10".to_owned())];
        ratios.push(panel(axis("time, flat copy = 1", Scale::Linear(0.9, 2.0)), ratio, marks));
    }
    times.extend(ratios);
    let until = "from the call until it is seen to be over, medians";
    vec![
        figure("throughput", format!("Throughput by size, {until} ({of})"), Content::Panels(2, rates)),
        figure(
            "latency",
            format!("Time by size and over the flat copy's, {until} ({of})"),
            Content::Panels(2, times),
        ),
    ]
}

/// CPU time of a submit: by size, and of one slab beside a bare launch.
fn cpu(table: &Table) -> Vec<Figure> {
    let mut figures = Vec::new();
    let mut panels = Vec::new();
    for (direction, word) in DIRECTIONS {
        let mut lines = Lines::default();
        let rows = table.rows().filter(|r| r.text("what") == "size cpu" && r.text("direction") == direction);
        for row in rows {
            if let (Some(bytes), Some(value)) = (row.number("bytes"), row.number("value")) {
                lines.add(row.text("engine"), Mark::LineAndPoints, (bytes, value));
            }
        }
        if !lines.0.is_empty() {
            panels.push(Panel {
                title: word.to_owned(),
                x: axis("bytes of one transfer", Scale::Bytes),
                y: axis("us of CPU", Scale::Log),
                series: lines.0,
                marks: vec![],
            });
        }
    }
    figures.push(figure("cpu", "CPU time of one submit by size, medians", Content::Panels(2, panels)));
    let mut groups = Groups::default();
    for row in table.rows().filter(|row| row.text("what") == "submit") {
        let (Some(value), Some(flat)) = (row.number("value"), row.number("flat")) else { continue };
        let label = format!("{} {}", row.text("engine"), row.text("direction"));
        groups.add(label.clone(), "bare launch", flat);
        groups.add(label, row.text("engine"), value);
    }
    let most = groups.0.iter().flat_map(|(_, bars)| bars).map(|(_, value)| *value).fold(0.0, f64::max);
    let title = "one slab, stream idle before, microseconds".to_owned();
    let bars = Bars { title, groups: groups.0, most, digits: 2, marks: vec![] };
    figures.push(figure(
        "submit",
        "CPU time of one submit of a slab of 256 tokens beside a bare launch, medians",
        Content::Bars(vec![bars]),
    ));
    figures
}

/// Every profile and layout: throughput over the flat copy's, a picture for each direction.
fn by_profile(table: &Table, who: &str) -> Vec<Figure> {
    let mut figures = Vec::new();
    for ((direction, word), name) in DIRECTIONS.into_iter().zip(["profiles-load", "profiles-store"]) {
        let mut groups = Groups::default();
        let rows =
            table.rows().filter(|r| r.text("what") == "throughput" && r.text("direction") == direction);
        for row in rows {
            if let Some(ratio) = row.number("ratio") {
                groups.add(place(row), row.text(who), ratio);
            }
        }
        let title = "Throughput of slabs of 256 tokens by profile and layout, beside one flat copy";
        figures.push(figure(name, title, Content::Bars(vec![groups.ratios(word)])));
    }
    figures
}

/// When the layers of a load are there: a line of panels for each profile and layout, a panel for each size.
fn layers(table: &Table) -> Option<Figure> {
    let rows = || table.rows().filter(|row| row.text("what").starts_with("layers "));
    let mut places: Vec<String> = Vec::new();
    for row in rows() {
        if !places.contains(&place(row)) {
            places.push(place(row));
        }
    }
    let mut panels = Vec::new();
    let mut columns = 1;
    for of in &places {
        let rows = || rows().filter(|row| place(*row) == *of);
        let sizes = values(rows(), "bytes");
        columns = columns.max(sizes.len());
        for bytes in sizes {
            let rows = || rows().filter(|row| row.text("bytes") == bytes);
            let ready = |row: Row<'_>| row.text("what").strip_prefix("layers ready ")?.parse::<f64>().ok();
            let last = rows().filter_map(ready).fold(1.0, f64::max);
            let each = rows().any(|row| ready(row).is_some());
            let mut lines = Lines::default();
            let even = "all layers evenly";
            lines.add(even, Mark::Line, (0.0, 0.0));
            lines.add(even, Mark::Line, (1.0, 1.0));
            for row in rows() {
                let at = match row.text("what") {
                    "layers first" if !each => Some(0.0),
                    "layers middle" if !each => Some(0.5),
                    "layers all" if !each => Some(1.0),
                    _ => ready(row).map(|layer| layer / last),
                };
                // In the order of the rows "all" comes before "first".
                if let (Some(at), Some(time)) = (at, row.number("ratio")) {
                    let mark = if each { Mark::Line } else { Mark::LineAndPoints };
                    lines.add(row.text("engine"), mark, (at, time));
                }
            }
            for series in &mut lines.0 {
                series.points.sort_by(|a, b| a.0.total_cmp(&b.0));
            }
            let size =
                bytes.parse::<f64>().map_or_else(|_| bytes.to_owned(), |b| format!("{:.0} MB", b / 1e6));
            panels.push(Panel {
                title: format!("{of}, {size}"),
                x: axis("layer, of all", Scale::Linear(0.0, 1.0)),
                y: axis("time, whole = 1", Scale::Linear(0.0, 1.4)),
                series: lines.0,
                marks: vec![],
            });
        }
    }
    let title =
        "When the layers of a load are there, submitted by layer, over the time of the same load whole";
    (!panels.is_empty()).then(|| figure("layers", title, Content::Panels(columns.min(3), panels)))
}

/// How much slower compute becomes at how many GB/s: lower and further right is better.
fn interference(table: &Table) -> Vec<Figure> {
    let mut panels = Vec::new();
    for load in values(table.rows(), "load") {
        for (direction, word) in DIRECTIONS {
            let rows = || table.rows().filter(|r| r.text("load") == load && r.text("direction") == direction);
            let mut lines = Lines::default();
            let mut flat = None;
            for row in rows() {
                if let (Some(gbps), Some(slowdown)) = (row.number("gbps"), row.number("slowdown")) {
                    lines.add(row.text("mover"), Mark::Point, (gbps, slowdown));
                    flat = flat.or((row.text("mover") == "flat copy").then_some(slowdown));
                }
            }
            if lines.0.is_empty() {
                continue;
            }
            let marks = flat.map(|flat| (flat.max(1.0) + 0.03, "flat copy's + 0.03".to_owned()));
            panels.push(Panel {
                title: format!("{load}, {word}"),
                x: axis("GB/s moved meanwhile", Scale::Upwards(0.0, 0.0)),
                y: axis("time of compute, alone = 1", Scale::Linear(0.95, 1.2)),
                series: lines.0,
                marks: marks.into_iter().collect(),
            });
        }
    }
    let title = "What transfers cost a busy GPU: slowdown of compute over GB/s moved, by mover";
    vec![figure("slowdown", title, Content::Panels(2, panels))]
}

fn direct(table: &Table) -> Vec<Figure> {
    let mut all = Vec::new();
    for (direction, word) in DIRECTIONS {
        let mut groups = Groups::default();
        let rows = table.rows().filter(|r| r.text("direction") == direction && r.text("launch") == "batch");
        for row in rows {
            let Some(ratio) = row.number("ratio") else { continue };
            let slots = if row.text("slots") == "host" { "" } else { ", slots on the device" };
            groups.add(
                format!("{}{slots}", place(row)),
                &format!("thread blocks: {}", row.text("blocks")),
                ratio,
            );
        }
        if !groups.0.is_empty() {
            all.push(groups.ratios(word));
        }
    }
    let title = "The kernel on host memory, beside one flat copy: by thread blocks of 1024 threads";
    vec![figure("blocks", title, Content::Bars(all))]
}

fn fallback(table: &Table) -> Vec<Figure> {
    let mut all = Vec::new();
    for direction in ["load", "store"] {
        let mut groups = Groups::default();
        for row in table.rows().filter(|row| row.text("direction") == direction) {
            let Some(ratio) = row.number("ratio") else { continue };
            let slab = if row.text("slab") == "registered" { "" } else { ", pageable slab" };
            let name = format!("{} blocks, layers {}{slab}", row.text("blocks"), row.text("layers"));
            groups.add(place(row), &name, ratio);
        }
        if !groups.0.is_empty() {
            all.push(groups.ratios(direction));
        }
    }
    let title =
        "Driver copies alone, beside one flat copy: by profile, layout, and where blocks and layers lie";
    vec![figure("profiles", title, Content::Bars(all))]
}

/// `maru bench`: by size where there are several, as bars all the same.
fn command_line(table: &Table) -> Vec<Figure> {
    let mut figures = Vec::new();
    let directions = [("scatter", "load (scatter)"), ("gather", "store (gather)")];
    let title = |row: Row<'_>, word: &str| format!("{} on {}, {word}", place(row), row.text("device"));
    let mut panels: Vec<(String, Lines)> = Vec::new();
    let mut all = Vec::new();
    for (direction, word) in directions {
        let mut groups = Groups::default();
        for row in table.rows().filter(|row| row.text("direction") == direction) {
            let numbers = (row.number("bytes"), row.number("gbps"), row.number("flat_gbps"));
            let (Some(bytes), Some(gbps), Some(flat)) = numbers else { continue };
            let title = title(row, word);
            let known = panels.iter().position(|(known, _)| *known == title);
            let index = known.unwrap_or_else(|| {
                panels.push((title, Lines::default()));
                panels.len() - 1
            });
            if let Some((_, lines)) = panels.get_mut(index) {
                lines.add("flat copy", Mark::LineAndPoints, (bytes, flat));
                lines.add(row.text("mover"), Mark::LineAndPoints, (bytes, gbps));
            }
            let label = format!("{}, {} tokens", place(row), row.text("tokens"));
            groups.add(label, row.text("mover"), gbps / flat);
        }
        if !groups.0.is_empty() {
            all.push(groups.ratios(word));
        }
    }
    panels.sort_by(|a, b| a.0.cmp(&b.0));
    let panels = panels.into_iter().map(|(title, lines)| Panel {
        title,
        x: axis("bytes of one batch", Scale::Bytes),
        y: axis("GB/s", Scale::Upwards(0.0, 0.0)),
        series: lines.0,
        marks: vec![],
    });
    figures.push(figure("throughput", "Throughput by size, medians", Content::Panels(2, panels.collect())));
    figures.push(figure(
        "profiles",
        "Throughput over the flat copy's by profile, layout and tokens, medians",
        Content::Bars(all),
    ));
    figures
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names and pictures of a table.
    fn drawn(text: &str) -> Vec<(String, String)> {
        let table = Table::parse("2026-11-30-x", text).expect("a table");
        let figures = figures(&table, "a device").expect("known columns");
        figures.iter().map(|f| (f.name.clone(), f.svg().expect("a picture"))).collect()
    }

    #[test]
    fn the_engines_rows() {
        let head = "what,profile,layout,direction,engine,strategy,bytes,value,unit,flat,ratio\n";
        let rows = "submit,p,l,H2D,direct,,8,5.5,us,3.5,1.5\n\
                    layers all,p,l,H2D,direct,direct,64,90,us,100,0.9\n\
                    layers ready 0,p,l,H2D,direct,direct,64,10,us,100,0.1\n\
                    layers ready 1,p,l,H2D,direct,direct,64,90,us,100,0.9\n";
        let drawn = drawn(&format!("# device: D\n# command: transfer --quick\n{head}{rows}"));
        let names: Vec<&str> = drawn.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["submit", "layers"]);
        assert!(drawn.iter().all(|(_, svg)| svg.contains("D; 2026-11-30; transfer --quick")), "{drawn:?}");
        assert!(drawn[0].1.contains("5.50") && drawn[0].1.contains("bare launch"));
    }

    #[test]
    fn the_command_lines_rows() {
        let text = "profile,layout,device,tokens,bytes,direction,mover,backend,strategy,threads,rounds,seconds,gbps,\
                    flat_seconds,flat_gbps,ratio\n\
                    p,mla,host,16,1024,gather,fallback/1,fallback,host,1,5,1e-6,1.0,1e-6,1.25,0.8\n\
                    p,mla,host,64,4096,gather,fallback/1,fallback,host,1,5,1e-6,4.0,1e-6,5.0,0.8\n";
        let drawn = drawn(text);
        let names: Vec<&str> = drawn.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["throughput", "profiles"]);
        assert!(drawn[1].1.contains("p mla, 64 tokens") && drawn[1].1.contains("0.800"), "{}", drawn[1].1);
    }

    #[test]
    fn other_columns_give_no_picture() {
        let table = Table::parse("x", "a,b\n1,2\n").expect("a table");
        assert!(figures(&table, "d").is_none());
    }
}
