//! The numbers as bars: one panel per device and direction, one group of bars per case, the flat copy first.

use std::path::Path;

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::bench::Row;
use crate::error::CliError;

/// Width of the picture, and where bars begin and may end, in pixels.
const WIDTH: i32 = 1000;
const LEFT: i32 = 380;
const RIGHT: i32 = 900;
const BAR: i32 = 14;
const GAP: i32 = 10;
const HEAD: i32 = 34;

/// One case: the flat copy's GB/s, then each mover's.
struct Group<'a> {
    label: String,
    bars: Vec<(&'a str, f64)>,
}

/// One device and direction.
struct Panel<'a> {
    title: String,
    groups: Vec<Group<'a>>,
}

pub(super) fn draw(path: &Path, rows: &[Row]) -> Result<(), CliError> {
    let failed = |e: &dyn std::fmt::Display| {
        CliError::io(format!("drawing {}", path.display()), std::io::Error::other(e.to_string()))
    };
    let svg = render(rows).map_err(|e| failed(&e))?;
    std::fs::write(path, svg).map_err(|e| CliError::io(format!("writing {}", path.display()), e))
}

fn panels(rows: &[Row]) -> Vec<Panel<'_>> {
    let mut panels: Vec<Panel<'_>> = Vec::new();
    for row in rows {
        let title = format!("{} on {}, GB/s", row.direction, row.device);
        let index = panels.iter().position(|p| p.title == title).unwrap_or(panels.len());
        if index == panels.len() {
            panels.push(Panel { title, groups: Vec::new() });
        }
        let Some(panel) = panels.get_mut(index) else { continue };
        let label = format!("{} {}, {} tokens", row.profile, row.layout, row.tokens);
        if panel.groups.last().is_none_or(|g| g.label != label) {
            panel.groups.push(Group { label, bars: vec![("flat copy", row.flat_gbps)] });
        }
        if let Some(group) = panel.groups.last_mut() {
            group.bars.push((&row.mover, row.gbps));
        }
    }
    panels
}

fn height(panel: &Panel<'_>) -> i32 {
    let bars = panel.groups.iter().map(|g| i32::try_from(g.bars.len()).unwrap_or(0)).sum::<i32>();
    let gaps = i32::try_from(panel.groups.len()).unwrap_or(0);
    bars.saturating_mul(BAR).saturating_add(gaps.saturating_mul(GAP)).saturating_add(HEAD)
}

fn render(rows: &[Row]) -> Result<String, Box<dyn std::error::Error>> {
    let panels = panels(rows);
    let total = panels.iter().fold(2 * GAP, |sum, p| sum.saturating_add(height(p)));
    let mut svg = String::new();
    {
        let size = (WIDTH.unsigned_abs(), total.unsigned_abs());
        let root = SVGBackend::with_string(&mut svg, size).into_drawing_area();
        root.fill(&WHITE)?;
        let font = |size: i32| ("sans-serif", size).into_font().color(&BLACK);
        let right = font(12).pos(Pos::new(HPos::Right, VPos::Center));
        let left = font(12).pos(Pos::new(HPos::Left, VPos::Center));
        let mut y = GAP;
        for panel in &panels {
            root.draw(&Text::new(panel.title.clone(), (GAP, y + 4), font(16)))?;
            y += HEAD;
            let most = panel.groups.iter().flat_map(|g| &g.bars).map(|(_, gbps)| *gbps).fold(0.0, f64::max);
            for group in &panel.groups {
                let count = i32::try_from(group.bars.len()).unwrap_or(0);
                let middle = y + count * BAR / 2;
                root.draw(&Text::new(group.label.clone(), (LEFT - GAP, middle), right.clone()))?;
                for (i, (mover, gbps)) in group.bars.iter().enumerate() {
                    let share = if most > 0.0 { (gbps / most).clamp(0.0, 1.0) } else { 0.0 };
                    let end = LEFT + pixels(share * f64::from(RIGHT - LEFT));
                    let colour = match i {
                        0 => RGBColor(170, 170, 170).to_rgba(),
                        _ => Palette99::pick(i).to_rgba(),
                    };
                    root.draw(&Rectangle::new([(LEFT, y), (end, y + BAR - 2)], colour.filled()))?;
                    // Long bars carry their text inside.
                    let text = format!("{gbps:.2} {mover}");
                    let (at, style) = match share > 0.7 {
                        true => (end - 4, &right),
                        false => (end + 4, &left),
                    };
                    root.draw(&Text::new(text, (at, y + BAR / 2 - 1), style.clone()))?;
                    y += BAR;
                }
                y += GAP;
            }
        }
        root.present()?;
    }
    Ok(svg)
}

/// A length inside the picture, so that it fits.
#[allow(clippy::cast_possible_truncation, reason = "between 0 and the picture's width")]
fn pixels(length: f64) -> i32 {
    length.clamp(0.0, f64::from(WIDTH)) as i32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(direction: &'static str, mover: &str, gbps: f64) -> Row {
        Row {
            profile: "p<&>".into(),
            layout: "mla",
            device: "host".into(),
            tokens: 16,
            bytes: 1,
            direction,
            mover: mover.into(),
            backend: "fallback",
            strategy: "host",
            threads: None,
            rounds: 1,
            seconds: 1.0,
            gbps,
            flat_seconds: 1.0,
            flat_gbps: 2.0,
            ratio: gbps / 2.0,
        }
    }

    #[test]
    fn every_number_is_drawn_and_text_is_escaped() {
        let rows = [row("gather", "a", 1.25), row("gather", "b", f64::NAN), row("scatter", "a", 0.0)];
        let svg = render(&rows).unwrap();
        for text in ["gather on host", "scatter on host", "1.25 a", "2.00 flat copy", "p&lt;&amp;&gt; mla"] {
            assert!(svg.contains(text), "{text}: {svg}");
        }
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
        assert!(render(&[]).unwrap().contains("<svg"));
    }
}
