//! Pictures: a title, a legend, panels of lines or points on axes, or of bars. Everything is drawn by hand with
//! plotters' elements, whose SVG needs no fonts on the machine that draws.

use plotters::coord::Shift;
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::scale::Scale;

type Error = Box<dyn std::error::Error>;
type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Plane<'a> = DrawingArea<SVGBackend<'a>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;

const WIDTH: i32 = 1000;
const MARGIN: i32 = 12;
const PANEL: i32 = 310;
/// Room in a panel for its title, and for numbers and words beside its axes.
const TOP: i32 = 40;
const LEFT: i32 = 62;
const BOTTOM: i32 = 46;
const RIGHT: i32 = 14;
const BAR: i32 = 13;
/// Where bars begin.
const BARS: i32 = 300;
/// Width of a legend's letter.
const LETTER: i32 = 7;

#[derive(Debug, Clone)]
pub(super) struct Axis {
    pub(super) label: String,
    pub(super) scale: Scale,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Mark {
    LineAndPoints,
    Line,
    Point,
}

#[derive(Debug, Clone)]
pub(super) struct Series {
    pub(super) name: String,
    pub(super) points: Vec<(f64, f64)>,
    pub(super) mark: Mark,
}

/// Some series on two axes.
#[derive(Debug, Clone)]
pub(super) struct Panel {
    pub(super) title: String,
    pub(super) x: Axis,
    pub(super) y: Axis,
    pub(super) series: Vec<Series>,
    /// Thin lines across: a number of y, what it means.
    pub(super) marks: Vec<(f64, String)>,
}

/// Groups of bars beside each other's labels.
#[derive(Debug, Clone)]
pub(super) struct Bars {
    pub(super) title: String,
    pub(super) groups: Vec<(String, Vec<(String, f64)>)>,
    /// Where the scale ends; longer bars are cut.
    pub(super) most: f64,
    pub(super) digits: usize,
    /// Thin lines at these numbers.
    pub(super) marks: Vec<f64>,
}

#[derive(Debug, Clone)]
pub(super) enum Content {
    /// Panels side by side, so many a line.
    Panels(usize, Vec<Panel>),
    Bars(Vec<Bars>),
}

/// One picture.
#[derive(Debug, Clone)]
pub(super) struct Figure {
    /// What is added to the record's name.
    pub(super) name: String,
    pub(super) title: String,
    /// Device, date and command.
    pub(super) origin: String,
    pub(super) content: Content,
}

/// Colours that the colour-blind tell apart.
const COLOURS: [RGBColor; 10] = [
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(240, 228, 66),
    RGBColor(140, 86, 75),
    RGBColor(120, 94, 240),
    RGBColor(160, 160, 160),
    RGBColor(150, 190, 80),
];
const FLAT: RGBColor = RGBColor(60, 60, 60);
const FALLBACK: RGBColor = RGBColor(213, 94, 0);
const GRID: RGBColor = RGBColor(225, 225, 225);

/// Colours that do not depend on what else is in a picture.
const FIXED: [(&str, RGBColor); 8] = [
    ("flat copy", FLAT),
    ("bare launch", FLAT),
    ("all layers evenly", FLAT),
    ("fallback", FALLBACK),
    ("fallback/copy_engine", FALLBACK),
    ("direct", COLOURS[0]),
    ("staged", COLOURS[1]),
    ("auto", COLOURS[2]),
];

/// One colour per mover: the usual ones have theirs, others take what is left in the order of their names.
fn colour(name: &str, names: &[String]) -> RGBColor {
    let fixed = |name: &str| FIXED.iter().find(|(known, _)| *known == name).map(|(_, colour)| *colour);
    let used: Vec<RGBColor> = names.iter().filter_map(|name| fixed(name)).collect();
    let free: Vec<RGBColor> = COLOURS.into_iter().filter(|colour| !used.contains(colour)).collect();
    let index = names.iter().filter(|name| fixed(name).is_none()).position(|other| other == name);
    let taken = index.and_then(|i| free.get(i % free.len().max(1))).copied();
    fixed(name).or(taken).unwrap_or(FLAT)
}

impl Figure {
    /// Names in the order in which they come.
    fn names(&self) -> Vec<String> {
        let all: Vec<&String> = match &self.content {
            Content::Panels(_, panels) => {
                panels.iter().flat_map(|p| p.series.iter().map(|s| &s.name)).collect()
            }
            Content::Bars(bars) => bars
                .iter()
                .flat_map(|b| b.groups.iter().flat_map(|(_, bars)| bars.iter().map(|(name, _)| name)))
                .collect(),
        };
        let mut names: Vec<String> = Vec::new();
        for name in all {
            if !names.contains(name) {
                names.push(name.clone());
            }
        }
        names
    }

    /// The picture as SVG.
    pub(super) fn svg(&self) -> Result<String, Error> {
        let names = self.names();
        let legend = legend_places(&names);
        let head = 48 + legend.last().map_or(0, |(_, y)| y + 22);
        let body = match &self.content {
            Content::Panels(columns, panels) => lines(panels.len(), *columns) * PANEL,
            Content::Bars(bars) => bars.iter().map(bars_height).sum(),
        };
        let size = (WIDTH.unsigned_abs(), (head + body + MARGIN).unsigned_abs());
        let mut svg = String::new();
        {
            let root = SVGBackend::with_string(&mut svg, size).into_drawing_area();
            root.fill(&WHITE)?;
            text(&root, &self.title, (MARGIN, 10), 17, (HPos::Left, VPos::Top))?;
            text(&root, &self.origin, (MARGIN, 32), 12, (HPos::Left, VPos::Top))?;
            for (name, (x, y)) in names.iter().zip(legend) {
                let (x, y) = (x, y + 58);
                root.draw(&Circle::new((x, y), 5, colour(name, &names).filled()))?;
                text(&root, name, (x + 10, y), 13, (HPos::Left, VPos::Center))?;
            }
            match &self.content {
                Content::Panels(columns, panels) => {
                    let width = (WIDTH - MARGIN) / i32::try_from(*columns)?;
                    for (i, panel) in panels.iter().enumerate() {
                        let (line, column) = (i32::try_from(i / columns)?, i32::try_from(i % columns)?);
                        panel.draw(&root, (column * width, head + line * PANEL), width, &names)?;
                    }
                }
                Content::Bars(all) => {
                    let mut y = head;
                    for bars in all {
                        bars.draw(&root, y, &names)?;
                        y += bars_height(bars);
                    }
                }
            }
            root.present()?;
        }
        Ok(svg)
    }
}

fn lines(panels: usize, columns: usize) -> i32 {
    i32::try_from(panels.div_ceil(columns.max(1))).unwrap_or(0)
}

/// Where each name of the legend stands, from the legend's top.
fn legend_places(names: &[String]) -> Vec<(i32, i32)> {
    let (mut x, mut y) = (MARGIN + 6, 0);
    let mut places = Vec::new();
    for name in names {
        let width = 34 + LETTER * i32::try_from(name.chars().count()).unwrap_or(0);
        if x + width > WIDTH && x > MARGIN + 6 {
            (x, y) = (MARGIN + 6, y + 18);
        }
        places.push((x, y));
        x += width;
    }
    places
}

fn text(area: &Area<'_>, text: &str, at: (i32, i32), size: i32, to: (HPos, VPos)) -> Result<(), Error> {
    let style = ("sans-serif", size).into_font().color(&BLACK).pos(Pos::new(to.0, to.1));
    area.draw(&Text::new(text.to_owned(), at, style))?;
    Ok(())
}

impl Panel {
    fn draw(&self, root: &Area<'_>, (x, y): (i32, i32), width: i32, names: &[String]) -> Result<(), Error> {
        let all = || self.series.iter().flat_map(|s| &s.points);
        let (xs, ys) = (self.x.scale.range(all().map(|p| p.0)), self.y.scale.range(all().map(|p| p.1)));
        let (left, right) = (x + LEFT, x + width - RIGHT);
        let (top, bottom) = (y + TOP, y + PANEL - BOTTOM);
        text(root, &self.title, ((left + right) / 2, y + 4), 14, (HPos::Center, VPos::Top))?;
        text(root, &self.x.label, ((left + right) / 2, bottom + 22), 12, (HPos::Center, VPos::Top))?;
        // Turned letters are the same in every viewer only where they stand: the unit above the axis.
        text(root, &self.y.label, (x + MARGIN, y + 23), 12, (HPos::Left, VPos::Top))?;
        let plane: Plane<'_> =
            root.clone().apply_coord_spec(Cartesian2d::<RangedCoordf64, RangedCoordf64>::new(
                xs.0..xs.1,
                ys.0..ys.1,
                (left..right, bottom..top),
            ));
        let pixel = |px: f64, py: f64| plane.map_coordinate(&(px, py));
        for tick in self.x.scale.ticks(xs) {
            let at = pixel(self.x.scale.place(tick), ys.0).0;
            root.draw(&PathElement::new(vec![(at, top), (at, bottom)], GRID))?;
            text(root, &self.x.scale.word(tick), (at, bottom + 5), 11, (HPos::Center, VPos::Top))?;
        }
        for tick in self.y.scale.ticks(ys) {
            let at = pixel(xs.0, self.y.scale.place(tick)).1;
            root.draw(&PathElement::new(vec![(left, at), (right, at)], GRID))?;
            text(root, &self.y.scale.word(tick), (left - 5, at), 11, (HPos::Right, VPos::Center))?;
        }
        for (value, word) in &self.marks {
            let at = pixel(xs.0, self.y.scale.place(*value)).1.clamp(top, bottom);
            root.draw(&PathElement::new(vec![(left, at), (right, at)], FLAT.mix(0.6)))?;
            text(root, word, (left + 3, at - 2), 11, (HPos::Left, VPos::Bottom))?;
        }
        root.draw(&Rectangle::new([(left, top), (right, bottom)], BLACK.mix(0.5)))?;
        for series in &self.series {
            let colour = colour(&series.name, names);
            let places = series.points.iter().map(|(a, b)| {
                let (px, py) = pixel(self.x.scale.place(*a), self.y.scale.place(*b));
                (px.clamp(left, right), py.clamp(top, bottom))
            });
            let places: Vec<(i32, i32)> = places.collect();
            if series.mark != Mark::Point && places.len() > 1 {
                root.draw(&PathElement::new(places.clone(), colour.stroke_width(2)))?;
            }
            // Of a line without points, its last number is enough.
            let outside = |(_, b): &&(f64, f64)| self.y.scale.place(*b) > ys.1;
            let numbers = if series.mark == Mark::Line { 1 } else { usize::MAX };
            for point in series.points.iter().rev().filter(outside).take(numbers) {
                let at = pixel(self.x.scale.place(point.0), ys.1).0.clamp(left, right);
                text(root, &format!("{:.2}", point.1), (at, top + 6), 11, (HPos::Center, VPos::Top))?;
            }
            // The engine's own choice lies on the line of what it chose: a ring leaves that visible.
            for place in places.iter().filter(|_| series.mark != Mark::Line) {
                match series.name.as_str() {
                    "auto" => root.draw(&Circle::new(*place, 6, colour.stroke_width(2)))?,
                    _ => root.draw(&Circle::new(*place, 4, colour.filled()))?,
                }
            }
        }
        Ok(())
    }
}

fn bars_height(bars: &Bars) -> i32 {
    let count: usize = bars.groups.iter().map(|(_, bars)| bars.len()).sum();
    let (count, groups) = (i32::try_from(count).unwrap_or(0), i32::try_from(bars.groups.len()).unwrap_or(0));
    34 + count * BAR + groups * 8 + MARGIN
}

impl Bars {
    fn draw(&self, root: &Area<'_>, y: i32, names: &[String]) -> Result<(), Error> {
        text(root, &self.title, (MARGIN, y + 4), 14, (HPos::Left, VPos::Top))?;
        let (mut y, end) = (y + 34, WIDTH - 90);
        let (top, bottom) = (y - 4, y - 34 + bars_height(self) - MARGIN);
        let length = |value: f64| {
            let share = if self.most > 0.0 { (value / self.most).clamp(0.0, 1.0) } else { 0.0 };
            pixels(share * f64::from(end - BARS))
        };
        for mark in &self.marks {
            let at = BARS + length(*mark);
            root.draw(&PathElement::new(vec![(at, top), (at, bottom)], BLACK.mix(0.3)))?;
            text(root, &format!("{mark}"), (at, top - 1), 11, (HPos::Center, VPos::Bottom))?;
        }
        for (label, bars) in &self.groups {
            let middle = y + i32::try_from(bars.len())? * BAR / 2;
            text(root, label, (BARS - 8, middle), 12, (HPos::Right, VPos::Center))?;
            for (name, value) in bars {
                let to = BARS + length(*value);
                let corners = [(BARS, y), (to, y + BAR - 2)];
                root.draw(&Rectangle::new(corners, colour(name, names).filled()))?;
                let digits = self.digits;
                let number = format!("{value:.digits$}");
                // On white, so that no line crosses it.
                let wide = LETTER * i32::try_from(number.len())?;
                root.draw(&Rectangle::new([(to + 2, y - 1), (to + 4 + wide, y + BAR - 2)], WHITE.filled()))?;
                text(root, &number, (to + 4, y + BAR / 2 - 1), 11, (HPos::Left, VPos::Center))?;
                y += BAR;
            }
            y += 8;
        }
        Ok(())
    }
}

/// A length inside the picture.
#[allow(clippy::cast_possible_truncation, reason = "between 0 and the picture's width")]
fn pixels(length: f64) -> i32 {
    length.clamp(0.0, f64::from(WIDTH)) as i32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn movers_have_colours_of_their_own() {
        let names = ["flat copy", "direct", "staged", "auto", "fallback", "x", "y"].map(str::to_owned);
        let mut colours: Vec<_> = names.iter().map(|name| colour(name, &names).rgb()).collect();
        colours.sort_unstable();
        colours.dedup();
        assert_eq!(colours.len(), names.len());
    }

    #[test]
    fn nothing_to_draw_is_drawn() {
        let axis = |scale| Axis { label: "x".into(), scale };
        let series = Series { name: "<a>".into(), points: vec![], mark: Mark::LineAndPoints };
        let panel = Panel {
            title: "t".into(),
            x: axis(Scale::Bytes),
            y: axis(Scale::Log),
            series: vec![series],
            marks: vec![],
        };
        let content = Content::Panels(2, vec![panel]);
        let figure = Figure { name: "n".into(), title: "t".into(), origin: "o".into(), content };
        let svg = figure.svg().expect("a picture");
        assert!(svg.starts_with("<svg") && svg.contains("&lt;a&gt;"), "{svg}");
    }
}
