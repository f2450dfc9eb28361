//! What passes through one buffer of the ring, and the copy between slab and buffer.

use cudarc::driver::sys::CUstream;
use maru_layout::{CopyJob, Direction, LayoutError, Piece, Pieces};

use super::spans::Spans;
use crate::abi::INLINE_SLOTS;
use crate::ring::CAPACITY;
use crate::{KernelError, LaunchStep};

/// Pieces that share a buffer: small slabs of one direction travel together, so that neither the copy engine nor
/// the kernel waits between them.
pub(super) struct Group<'a> {
    pub(super) direction: Direction,
    /// The step they belong to; a buffer never holds pieces of two.
    pub(super) step: usize,
    /// Each with its offset in the buffer.
    members: Vec<(&'a Pieces, Piece, u64)>,
}

/// Cuts steps into groups for buffers of `room` bytes.
pub(super) fn groups<'a>(steps: &[LaunchStep<'a, Pieces>], room: u64) -> Vec<Group<'a>> {
    let mut groups: Vec<Group<'a>> = Vec::with_capacity(1);
    for (index, step) in steps.iter().enumerate() {
        for pieces in step.jobs {
            let direction = pieces.job().direction();
            for piece in pieces.list() {
                match groups.last_mut() {
                    Some(group) if group.takes(index, direction, piece, room) => group.add(pieces, *piece),
                    _ => {
                        let mut group = Group { direction, step: index, members: Vec::with_capacity(1) };
                        group.add(pieces, *piece);
                        groups.push(group);
                    }
                }
            }
        }
    }
    taper(&mut groups, room);
    groups
}

/// Loads end with a kernel and stores begin with one, and nothing is copied meanwhile: lets that be little.
fn taper(groups: &mut Vec<Group<'_>>, room: u64) {
    // What fits one buffer stays on one stream.
    if groups.len() < 2 {
        return;
    }
    let little = room / 8;
    let cuts = |group: &Group<'_>, direction| group.direction == direction && group.end() >= room / 2;
    if let Some(last) = groups.pop_if(|last| cuts(last, Direction::Scatter)) {
        let most = last.end() - little;
        groups.extend(last.cut(most));
    }
    if cuts(&groups[0], Direction::Gather) {
        let first = groups.remove(0);
        let plane = first.members.first().map_or(0, |(_, piece, _)| piece.pitch);
        groups.splice(..0, first.cut(little.max(plane)));
    }
}

impl<'a> Group<'a> {
    /// Where the next piece would begin: on a border that suits every access.
    fn end(&self) -> u64 {
        self.members.last().map_or(0, |(_, piece, at)| (at + piece.room()).next_multiple_of(256))
    }

    fn takes(&self, step: usize, direction: Direction, piece: &Piece, room: u64) -> bool {
        self.step == step && self.direction == direction && self.end() + piece.room() <= room
    }

    /// The transfers whose slots a launch reads on the device: those that share one, and those with more slots than go
    /// by value.
    pub(super) fn listed(&self) -> impl Iterator<Item = &'a CopyJob> {
        let shared = self.members.len() > 1;
        let long = |job: &CopyJob| {
            let slots = job.tokens() - job.skip();
            slots > INLINE_SLOTS as u64 && slots <= u64::from(CAPACITY)
        };
        self.members.iter().map(|(pieces, ..)| pieces.job()).filter(move |job| shared || long(job))
    }

    /// Whether both are of one step and direction.
    pub(super) fn goes_with(&self, other: &Group<'_>) -> bool {
        self.step == other.step && self.direction == other.direction
    }

    fn add(&mut self, pieces: &'a Pieces, piece: Piece) {
        self.members.push((pieces, piece, self.end()));
    }

    /// Cuts it in two, the first of which takes at most so many bytes of a buffer, or in one where that cannot be.
    fn cut(self, most: u64) -> impl Iterator<Item = Group<'a>> {
        let empty = || Group { direction: self.direction, step: self.step, members: Vec::new() };
        let mut parts = [empty(), empty()];
        for (pieces, piece, at) in self.members {
            match piece.split(most.saturating_sub(at) / piece.pitch.max(1)) {
                Some((head, rest)) if at + piece.room() > most => {
                    parts[0].add(pieces, head);
                    parts[1].add(pieces, rest);
                }
                _ => parts[usize::from(at + piece.room() > most)].add(pieces, piece),
            }
        }
        parts.into_iter().filter(|part| !part.members.is_empty())
    }

    /// The jobs between buffer and pages.
    pub(super) fn jobs(&self, buffer: u64) -> Result<Vec<CopyJob>, LayoutError> {
        self.members.iter().map(|(pieces, piece, at)| pieces.staged(piece, None, Some(buffer + at))).collect()
    }

    /// Copies everything between slabs and buffer by the copy engine.
    ///
    /// # Safety
    /// The slabs are host memory that stays, and the pieces lie in them; the buffer has room for the group.
    pub(super) unsafe fn copy(&self, buffer: u64, stream: CUstream) -> Result<(), KernelError> {
        let into = self.direction == Direction::Scatter;
        let mut spans = Vec::with_capacity(self.members.len());
        for (pieces, piece, at) in &self.members {
            let slab = pieces.job().slab().host.ok_or(KernelError::SlabNotAddressable)?;
            spans.extend(spans_of(piece, slab.wrapping_add_signed(piece.offset), buffer + at));
        }
        let mut rest = &spans[..];
        while let Some(first) = rest.first() {
            let mut joined = *first;
            let mut taken = 1;
            while let Some(longer) = rest.get(taken).and_then(|next| joined.joined(next)) {
                (joined, taken) = (longer, taken + 1);
            }
            let (these, others) = rest.split_at(taken);
            rest = others;
            // SAFETY: the caller's promise.
            match unsafe { joined.copy(into, stream) } {
                // Slabs side by side may be of several registrations, over which the driver copies nothing.
                Err(error) if taken > 1 && is_refusal(&error) => {
                    // SAFETY: as above.
                    these.iter().try_for_each(|spans| unsafe { spans.copy(into, stream) })?;
                }
                outcome => outcome?,
            }
        }
        Ok(())
    }
}

fn is_refusal(error: &KernelError) -> bool {
    matches!(error, KernelError::Driver(error) if error.is_refusal())
}

/// The copies of a piece: one, unless prefixes are left out in several runs.
fn spans_of(piece: &Piece, host: u64, buffer: u64) -> impl Iterator<Item = Spans> {
    let (host_step, device_step) = (piece.run_stride, piece.height * piece.pitch);
    let whole = piece.has_whole_runs();
    let spans = match whole {
        true => Spans {
            width: piece.width * piece.height,
            rows: piece.runs,
            host_pitch: host_step,
            device_pitch: device_step,
            ..Spans::at(host, buffer + piece.lead)
        },
        false => Spans {
            width: piece.width,
            rows: piece.height,
            host_pitch: piece.pitch,
            device_pitch: piece.pitch,
            ..Spans::at(host, buffer + piece.lead)
        },
    };
    let copies = if whole { 1 } else { piece.runs };
    (0..copies).map(move |run| spans.shifted(run * host_step, run * device_step))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use maru_layout::{CopyPlan, JobRequest, PagedLayout, SlabLayout, SlabSpan, SlotMapping};
    use proptest::prelude::*;

    use super::*;
    use crate::geometry::tests::spec;

    /// Of 2 x 4 planes, 32 rows of 256 bytes each: 8 KiB a plane, 64 KiB a slab.
    fn slabs(direction: Direction, count: u64) -> Vec<CopyJob> {
        let paged = PagedLayout::from_strides(&spec(16, 1000)).unwrap();
        let slab = SlabLayout::of_cache(&paged, 2, 4, 32).unwrap();
        let bases: Vec<u64> = (1..=8).map(|i| 0x1000_0000 * i).collect();
        let plan = Arc::new(CopyPlan::new(&paged, &slab, bases).unwrap());
        let len = plan.slab().bytes();
        let job = |i: u64| {
            let slots: Vec<i64> = (0..32).map(|t| i64::try_from(32 * i + t).unwrap()).collect();
            let addr = Some(0x10_0000 * (i + 1));
            let slab = SlabSpan { host: addr, device: addr, len };
            let slots = SlotMapping::from_slots(slots);
            let request = JobRequest { direction, slab, slots, skip_tokens: 0, partial: false, layers: None };
            CopyJob::new(plan.clone(), request).unwrap()
        };
        (0..count).map(job).collect()
    }

    /// Bytes of each group.
    fn sizes(direction: Direction, count: u64, room: u64) -> Vec<u64> {
        let pieces: Vec<_> = slabs(direction, count).iter().map(|job| job.pieces(room).unwrap()).collect();
        let groups = groups(&[LaunchStep::new(&pieces)], room);
        // Whatever the groups, every byte of every slab passes once, in order.
        let mut passed = groups.iter().flat_map(|group| &group.members).map(|(pieces, piece, _)| {
            let slab = pieces.job().slab().host.unwrap();
            (slab.wrapping_add_signed(piece.offset), piece.bytes())
        });
        for job in slabs(direction, count) {
            let (mut at, end) = (job.slab().host.unwrap(), job.slab().host.unwrap() + 65536);
            while at < end {
                let (from, bytes) = passed.next().unwrap();
                assert_eq!(from, at);
                at += bytes;
            }
            assert_eq!(at, end);
        }
        assert!(passed.next().is_none());
        assert!(groups.iter().all(|group| group.end() <= room && !group.members.is_empty()));
        groups.iter().map(Group::end).collect()
    }

    /// Whether it loads, what it skips, its layers.
    type Asked = (bool, u64, Option<(u32, u32)>);

    /// Step, slab and place in it of each span.
    fn spans(step: usize, pieces: &Pieces, piece: &Piece) -> Vec<(usize, Option<u64>, i64, u64)> {
        let at = |run, span| piece.offset.checked_add_unsigned(run * piece.run_stride + span * piece.pitch);
        let slab = pieces.job().slab().host;
        let all = (0..piece.runs).flat_map(|run| (0..piece.height).map(move |span| (run, span)));
        all.map(|(run, span)| (step, slab, at(run, span).unwrap(), piece.width)).collect()
    }

    proptest! {
        /// Slabs of any prefix and layers, both directions, two steps: the same spans in the same order as without cuts,
        /// in buffers that hold them side by side.
        #[test]
        fn cuts_change_no_span(
            asked in prop::collection::vec((any::<bool>(), 0u64..32, prop::option::of((0u32..4, 1u32..=4))), 1..9),
            rooms in 2u64..40,
            second in 0usize..9,
        ) {
            let room = rooms * 4096;
            let plan = slabs(Direction::Scatter, 1)[0].plan().clone();
            let job = |(i, &(load, skip, layers)): (u64, &Asked)| {
                let addr = Some(0x10_0000 * (i + 1));
                let request = JobRequest {
                    direction: if load { Direction::Scatter } else { Direction::Gather },
                    slab: SlabSpan { host: addr, device: addr, len: plan.slab().bytes() },
                    slots: SlotMapping::from_slots((0..32).collect::<Vec<i64>>()),
                    skip_tokens: skip,
                    partial: true,
                    layers: layers.map(|(first, count)| (first, count.min(4 - first))),
                };
                CopyJob::new(plan.clone(), request).unwrap().pieces(room).unwrap()
            };
            let pieces: Vec<Pieces> = (0..).zip(&asked).map(job).collect();
            let steps = pieces.split_at(second.min(pieces.len()));
            let steps = [steps.0, steps.1];
            let found = groups(&steps.map(LaunchStep::new), room);
            let mut wanted = Vec::new();
            for (step, pieces) in steps.iter().enumerate().flat_map(|(i, list)| list.iter().map(move |p| (i, p))) {
                pieces.list().iter().for_each(|piece| wanted.extend(spans(step, pieces, piece)));
            }
            let mut passed = Vec::new();
            for group in &found {
                group.members.iter().for_each(|(pieces, piece, _)| passed.extend(spans(group.step, pieces, piece)));
            }
            prop_assert_eq!(passed, wanted);
            for group in &found {
                let mut end = 0;
                for (pieces, piece, at) in &group.members {
                    prop_assert!(*at >= end && pieces.job().direction() == group.direction);
                    end = at + piece.room();
                }
                prop_assert!(0 < end && end <= room);
            }
        }
    }

    #[test]
    fn loads_end_and_stores_begin_with_little() {
        const KIB: u64 = 1024;
        let kib = |sizes: Vec<u64>| sizes.iter().map(|n| n / KIB).collect::<Vec<_>>();
        for (slabs, room, load, store) in [
            // One slab in two buffers: its last, or first, plane alone.
            (1, 32, vec![32, 24, 8], vec![8, 24, 32]),
            // Two slabs a buffer, cut within a slab.
            (4, 128, vec![128, 112, 16], vec![16, 112, 128]),
            // Planes larger than an eighth of a buffer.
            (1, 16, vec![16, 16, 16, 8, 8], vec![8, 8, 16, 16, 16]),
            // A buffer for each plane.
            (1, 8, vec![8; 8], vec![8; 8]),
            // One buffer, and little left for the second.
            (2, 128, vec![128], vec![128]),
            (3, 160, vec![128, 64], vec![16, 112, 64]),
        ] {
            assert_eq!(kib(sizes(Direction::Scatter, slabs, room * KIB)), load, "{slabs} slabs, {room} KiB");
            assert_eq!(kib(sizes(Direction::Gather, slabs, room * KIB)), store, "{slabs} slabs, {room} KiB");
        }
    }
}
