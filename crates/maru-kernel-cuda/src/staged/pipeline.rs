//! The way of groups through the ring: into a buffer and out of it.

use std::sync::Arc;

use maru_layout::Direction;

use super::group::Group;
use super::lanes::{Lanes, order};
use super::{Ring, StagedLaunch};
use crate::launched::{Mark, State};
use crate::session::Session;
use crate::{KernelError, Launched, PagedCopyKernel, PlaneTable};

/// What one call sends through the ring. The context stays current while it lives.
pub(super) struct Pipeline<'a> {
    pub(super) kernel: &'a PagedCopyKernel,
    pub(super) planes: &'a PlaneTable,
    pub(super) ring: &'a mut Ring,
    /// On the lane of the kernel.
    pub(super) session: Session<'a>,
    pub(super) lanes: Lanes,
    /// One per step.
    pub(super) launched: &'a mut [StagedLaunch],
    /// Where loads have come to.
    pub(super) end_of_loads: Option<Arc<Mark>>,
}

impl<'a> Pipeline<'a> {
    /// Sends a group through the next buffer. `closes`: it is the last of its step and direction.
    ///
    /// # Safety
    /// As [`super::StagedMover::launch`]; the context is current.
    pub(super) unsafe fn push(&mut self, group: &Group<'_>, closes: bool) -> Result<(), KernelError> {
        // SAFETY: the caller's promises, passed on.
        let buffer = unsafe { self.fill(group) }?;
        // SAFETY: as above.
        unsafe { self.drain(group, buffer, closes) }
    }

    /// Everything is pushed; where the loads end.
    pub(super) fn finish(self) -> Result<Option<Arc<Mark>>, KernelError> {
        self.session.finish()?;
        Ok(self.end_of_loads)
    }

    /// Slab → buffer by the copy engine, or pages → buffer by the kernel.
    ///
    /// # Safety
    /// As [`Pipeline::push`].
    unsafe fn fill(&mut self, group: &Group<'_>) -> Result<usize, KernelError> {
        let (first, last) = self.lanes.ends(group.direction);
        let index = self.ring.next;
        self.ring.next = (index + 1) % self.ring.buffers.len();
        let buffer = &self.ring.buffers[index];
        if let Some(free) = buffer.free.as_ref().filter(|free| !free.is_known_over()) {
            // SAFETY: the stream is the mover's or the caller's.
            unsafe { free.order_before(first) }?;
        }
        match group.direction {
            // SAFETY: the slabs are the caller's promise; the group fits the buffer.
            Direction::Scatter => unsafe { group.copy(buffer.addr, first) }?,
            Direction::Gather => {
                // A store through the ring has no slots on the device, so there is nothing that it could report.
                let mut parts = Vec::with_capacity(1);
                let jobs = group.jobs(buffer.addr)?;
                // SAFETY: the planes are the caller's promise; the buffer holds the group.
                unsafe { self.session.put_many(&jobs, &mut parts) }?;
            }
        }
        // SAFETY: the event is the mover's; the streams are the mover's or the caller's.
        unsafe { order(&buffer.full, first, last) }?;
        Ok(index)
    }

    /// Buffer → pages by the kernel, or buffer → slab by the copy engine.
    ///
    /// # Safety
    /// As [`Pipeline::push`].
    unsafe fn drain(&mut self, group: &Group<'_>, buffer: usize, closes: bool) -> Result<(), KernelError> {
        let buffer = &mut self.ring.buffers[buffer];
        let parts = &mut self.launched[group.step].parts;
        let end = match group.direction {
            Direction::Scatter => {
                let mut queued = Vec::with_capacity(1);
                let jobs = group.jobs(buffer.addr)?;
                // SAFETY: the planes are the caller's promise; the buffer holds the group.
                unsafe { self.session.put_many(&jobs, &mut queued) }?;
                let Some(last) = queued.pop() else { return Ok(()) };
                // Of one stream the last is over last; others matter if they have something to report.
                parts.extend(queued.into_iter().filter(Launched::reports));
                last
            }
            Direction::Gather => {
                let (_, last) = self.lanes.ends(group.direction);
                // SAFETY: the slabs are the caller's promise; the buffer holds the group.
                unsafe { group.copy(buffer.addr, last) }?;
                let ticket = self.kernel.inner.tickets.take()?;
                // SAFETY: the stream is the mover's or the caller's.
                let mark = unsafe { self.kernel.mark(Ok(()), ticket, (None, 1), last) }?;
                Launched::new(&self.kernel.inner, self.planes, State::Queued { mark, reports: false }, 0)
            }
        };
        buffer.free = end.mark().cloned();
        if group.direction == Direction::Scatter {
            self.end_of_loads = end.mark().cloned();
        }
        if closes || end.reports() {
            parts.push(end);
        }
        Ok(())
    }
}
