//! How numbers lie on an axis, and which of them are written at it.

/// How numbers lie on an axis.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Scale {
    /// From the first to the second number; what lies outside is drawn at the border, with its number.
    Linear(f64, f64),
    /// From the first number to the second, or to what there is to draw.
    Upwards(f64, f64),
    /// Powers of ten.
    Log,
    /// Bytes, in powers of two.
    Bytes,
}

impl Scale {
    pub(super) fn place(self, value: f64) -> f64 {
        match self {
            Scale::Linear(..) | Scale::Upwards(..) => value,
            Scale::Log => value.max(1e-9).log10(),
            Scale::Bytes => value.max(1.0).log2(),
        }
    }

    /// From and to, in places, around these numbers.
    pub(super) fn range(self, values: impl Iterator<Item = f64>) -> (f64, f64) {
        match self {
            Scale::Linear(from, to) => return (from, to),
            Scale::Upwards(from, least) => {
                return (from, values.map(|value| value * 1.05).fold(least, f64::max));
            }
            Scale::Log | Scale::Bytes => {}
        }
        let places = values.filter(|v| *v > 0.0).map(|v| self.place(v));
        let (least, most) = places.fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), p| (a.min(p), b.max(p)));
        match (self, least <= most) {
            (_, false) => (0.0, 1.0),
            (Scale::Bytes, _) => (least - 0.5, most + 0.5),
            _ => (least - 0.1, most + 0.1),
        }
    }

    /// Numbers that are written at the axis, in a range of places.
    pub(super) fn ticks(self, (from, to): (f64, f64)) -> Vec<f64> {
        match self {
            Scale::Linear(..) | Scale::Upwards(..) => {
                let step = nice((to - from) / 6.0);
                let first = (from / step).ceil();
                let count = ((to - first * step) / step + 1e-9).floor().max(0.0);
                steps(count).map(|i| (first + i) * step).collect()
            }
            Scale::Log => {
                let (first, last) = (from.ceil(), to.floor());
                let decades = steps(last - first).map(|i| 10f64.powf(first + i));
                match last - first {
                    // Few powers of ten: twos and fives, too.
                    n if n < 3.0 => steps(last - first + 1.0)
                        .flat_map(|i| [1.0, 2.0, 5.0].map(|m| m * 10f64.powf(first - 1.0 + i)))
                        .chain(std::iter::once(10f64.powf(last + 1.0)))
                        .filter(|v| (from..=to).contains(&self.place(*v)))
                        .collect(),
                    _ => decades.collect(),
                }
            }
            Scale::Bytes => {
                let apart = if to - from > 9.0 { 2.0 } else { 1.0 };
                let first = (from / apart).ceil();
                steps(((to - first * apart) / apart).floor()).map(|i| (apart * (first + i)).exp2()).collect()
            }
        }
    }

    pub(super) fn word(self, value: f64) -> String {
        match self {
            Scale::Bytes => match value {
                v if v >= 1024f64.powi(3) => format!("{} GiB", v / 1024f64.powi(3)),
                v if v >= 1024f64.powi(2) => format!("{} MiB", v / 1024f64.powi(2)),
                v if v >= 1024.0 => format!("{} KiB", v / 1024.0),
                v => format!("{v} B"),
            },
            _ => format!("{}", (value * 1e6).round() / 1e6),
        }
    }
}

/// 0, 1, … up to a number.
fn steps(most: f64) -> impl Iterator<Item = f64> {
    (0..64).map(f64::from).take_while(move |i| *i <= most)
}

/// 1, 2 or 5 times a power of ten, no less than this.
fn nice(step: f64) -> f64 {
    let power = 10f64.powf(step.max(1e-12).log10().floor());
    [1.0, 2.0, 5.0].map(|m| m * power).into_iter().find(|n| *n >= step).unwrap_or(10.0 * power)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_are_written_at_round_numbers() {
        assert_eq!(Scale::Linear(0.0, 60.0).ticks((0.0, 60.0)), [0.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0]);
        assert_eq!(Scale::Log.ticks((0.9, 4.1)), [10.0, 100.0, 1000.0, 10000.0]);
        assert_eq!(Scale::Log.ticks((0.2, 1.4)), [2.0, 5.0, 10.0, 20.0]);
        let bytes = Scale::Bytes;
        let words: Vec<String> = bytes.ticks((15.5, 31.5)).into_iter().map(|v| bytes.word(v)).collect();
        assert_eq!(words.first().map(String::as_str), Some("64 KiB"));
        assert!(words.contains(&"1 MiB".to_owned()) && words.contains(&"1 GiB".to_owned()), "{words:?}");
    }
}
