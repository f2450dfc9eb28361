//! Do two elements of a strided tensor, or two planes of one cache, share a byte?
//!
//! The question is whether a bounded integer combination of the strides comes closer to some distance than
//! one element is wide. For every layout an engine produces the strides nest and the first look answers;
//! for the rest a depth-first search over the axes, largest stride first, is cut by what the remaining axes
//! can still reach. The search is bounded, and running out of budget is an answer of its own.

/// Nodes looked at before giving up; real layouts need fewer than a hundred.
const BUDGET: u32 = 200_000;

/// Outcome of an overlap search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Overlap {
    /// No byte is shared.
    Disjoint,
    /// At least one byte is shared.
    Shared,
    /// Too irregular to decide within the budget.
    Unproven,
}

/// Axes longer than 1, sorted by stride, largest first, with what the later ones can reach together.
struct Search {
    axes: Vec<(i128, i128)>, // (stride, length - 1)
    reach: Vec<i128>,        // reach[i] = sum of stride * (length - 1) over axes i..
    width: i128,
    budget: u32,
}

impl Search {
    fn new(axes: &[(u64, u64)], width: u64) -> Self {
        let mut axes: Vec<(i128, i128)> = axes
            .iter()
            .filter(|(len, _)| *len > 1)
            .map(|&(len, stride)| (i128::from(stride), i128::from(len) - 1))
            .collect();
        axes.sort_unstable_by(|a, b| b.cmp(a));
        let mut reach = vec![0i128; axes.len() + 1];
        for i in (0..axes.len()).rev() {
            reach[i] = reach[i + 1].saturating_add(axes[i].0.saturating_mul(axes[i].1));
        }
        Search { axes, reach, width: i128::from(width), budget: BUDGET }
    }

    /// Is there a combination of axes `i..` within `width` of `target`? `zero` says that all coefficients so
    /// far were zero and that the all-zero combination does not count.
    fn find(&mut self, i: usize, target: i128, zero: bool) -> Overlap {
        if self.budget == 0 {
            return Overlap::Unproven;
        }
        self.budget -= 1;
        let Some(&(stride, most)) = self.axes.get(i) else {
            let hit = target.abs() < self.width && !zero;
            return if hit { Overlap::Shared } else { Overlap::Disjoint };
        };
        let slack = self.reach[i + 1].saturating_add(self.width - 1);
        let low = (target - slack).div_euclid(stride) + i128::from((target - slack).rem_euclid(stride) != 0);
        let high = (target + slack).div_euclid(stride);
        // Differences come in pairs of opposite sign, so the first non-zero coefficient may be positive.
        let low = if zero { low.max(0) } else { low.max(-most) };
        let mut answer = Overlap::Disjoint;
        for c in low..=high.min(most) {
            match self.find(i + 1, target - c * stride, zero && c == 0) {
                Overlap::Disjoint => {}
                Overlap::Shared => return Overlap::Shared,
                Overlap::Unproven => answer = Overlap::Unproven,
            }
            if self.budget == 0 {
                return Overlap::Unproven;
            }
        }
        answer
    }
}

/// Whether two different positions of a tensor of `(length, stride)` axes come closer than `width`.
pub(crate) fn self_overlap(axes: &[(u64, u64)], width: u64) -> Overlap {
    Search::new(axes, width).find(0, 0, true)
}

/// Whether two equal boxes of `(length, stride)` axes, `distance` apart, share one of their `width`-wide cells.
pub(crate) fn shifted_overlap(axes: &[(u64, u64)], width: u64, distance: i128) -> Overlap {
    let mut search = Search::new(axes, width);
    if distance.abs() >= search.reach[0] + search.width {
        return Overlap::Disjoint;
    }
    search.find(0, distance, false)
}

/// The first two of `bases` whose planes (all of the shape of `layout`) share a byte or cannot be shown not
/// to, as indices into `bases`.
pub fn planes_overlap(layout: &crate::PagedLayout, bases: &[u64]) -> Option<(usize, usize)> {
    let axes = layout.plane_axes();
    let mut order: Vec<usize> = (0..bases.len()).collect();
    order.sort_unstable_by_key(|&i| bases[i]);
    // Evenly spaced planes repeat the same few distances: remember what was shown.
    let mut seen: Vec<i128> = Vec::new();
    for (n, &a) in order.iter().enumerate() {
        for &b in &order[n + 1..] {
            let distance = i128::from(bases[b]) - i128::from(bases[a]);
            if distance >= i128::from(layout.plane_bytes()) {
                break;
            }
            if seen.contains(&distance) {
                continue;
            }
            if shifted_overlap(&axes, layout.head_bytes(), distance) != Overlap::Disjoint {
                return Some((a.min(b), a.max(b)));
            }
            if seen.len() < 1024 {
                seen.push(distance);
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn brute(axes: &[(u64, u64)], width: u64, distance: i128) -> bool {
        let mut points = vec![0i128];
        for &(len, stride) in axes {
            points = points
                .iter()
                .flat_map(|p| (0..len).map(move |i| p + i128::from(i) * i128::from(stride)))
                .collect();
        }
        points.iter().enumerate().any(|(i, a)| {
            points
                .iter()
                .enumerate()
                .any(|(j, b)| (distance != 0 || i != j) && (a + distance - b).abs() < i128::from(width))
        })
    }

    proptest! {
        #[test]
        fn search_equals_brute_force(
            axes in prop::collection::vec((1u64..4, 1u64..20), 1..4),
            width in 1u64..4,
            distance in 0i128..60,
        ) {
            let expect = if brute(&axes, width, 0) { Overlap::Shared } else { Overlap::Disjoint };
            prop_assert_eq!(self_overlap(&axes, width), expect);
            if distance > 0 {
                let expect = if brute(&axes, width, distance) { Overlap::Shared } else { Overlap::Disjoint };
                prop_assert_eq!(shifted_overlap(&axes, width, distance), expect);
            }
        }
    }

    #[test]
    fn interleaved_but_disjoint_strides_are_disjoint() {
        assert_eq!(self_overlap(&[(2, 3), (3, 2)], 1), Overlap::Disjoint);
        assert_eq!(self_overlap(&[(3, 3), (4, 2)], 1), Overlap::Shared);
    }

    #[test]
    fn huge_axes_do_not_overflow() {
        let axes = [(1 << 40, 1 << 22), (1 << 20, 2)];
        assert_eq!(self_overlap(&axes, 1), Overlap::Disjoint);
    }
}
