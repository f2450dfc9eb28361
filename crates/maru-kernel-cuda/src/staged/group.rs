//! What passes through one buffer of the ring, and the copy between slab and buffer.

use cudarc::driver::sys::CUstream;
use maru_layout::{CopyJob, Direction, Piece, Pieces};

use super::spans::Spans;
use crate::{KernelError, LaunchStep};

/// Pieces that share a buffer: small slabs of one direction travel together, so that neither the copy engine nor
/// the kernel waits between them.
pub(super) struct Group<'a> {
    pub(super) direction: Direction,
    /// The step they belong to; a buffer never holds pieces of two.
    pub(super) step: usize,
    /// Each with its offset in the buffer.
    members: Vec<(&'a Pieces, &'a Piece, u64)>,
}

/// Cuts steps into groups for buffers of `room` bytes.
pub(super) fn groups<'a>(steps: &[LaunchStep<'a, Pieces>], room: u64) -> Vec<Group<'a>> {
    let mut groups: Vec<Group<'a>> = Vec::with_capacity(1);
    for (index, step) in steps.iter().enumerate() {
        for pieces in step.jobs {
            let direction = pieces.job().direction();
            for piece in pieces.list() {
                match groups.last_mut() {
                    Some(group) if group.takes(index, direction, piece, room) => group.add(pieces, piece),
                    _ => {
                        let members = vec![(pieces, piece, 0)];
                        groups.push(Group { direction, step: index, members });
                    }
                }
            }
        }
    }
    groups
}

impl<'a> Group<'a> {
    /// Where the next piece would begin: on a border that suits every access.
    fn end(&self) -> u64 {
        self.members.last().map_or(0, |(_, piece, at)| (at + piece.room()).next_multiple_of(256))
    }

    fn takes(&self, step: usize, direction: Direction, piece: &Piece, room: u64) -> bool {
        self.step == step && self.direction == direction && self.end() + piece.room() <= room
    }

    /// The transfers that share launches, none if there is but one.
    pub(super) fn sharing(&self) -> impl Iterator<Item = &'a CopyJob> {
        let members = if self.members.len() > 1 { &self.members[..] } else { &[] };
        members.iter().map(|(pieces, ..)| pieces.job())
    }

    /// Whether both are of one step and direction.
    pub(super) fn goes_with(&self, other: &Group<'_>) -> bool {
        self.step == other.step && self.direction == other.direction
    }

    fn add(&mut self, pieces: &'a Pieces, piece: &'a Piece) {
        self.members.push((pieces, piece, self.end()));
    }

    /// The jobs between buffer and pages.
    pub(super) fn jobs(&self, buffer: u64) -> Vec<CopyJob> {
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
