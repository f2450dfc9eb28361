//! What a call of `Engine` asks for, read from its arguments before the GIL is released.

use std::borrow::Cow;

use maru_cxl::Slab;
use maru_layout::{Direction, Fingerprint, SlotMapping};
use maru_transfer::{Event, Place, RegisteredCache, Stream, TransferRequest};
use pyo3::prelude::*;
use pyo3::types::PyRange;

use crate::args::{self, Arg};
use crate::cache::PyPagedCache;
use crate::errors::{Fault, Result};
use crate::memory::Foreign;
use crate::process::{Keep, process};
use crate::region::PySlab;
use crate::tensor::{Tensor, event_handle};
use crate::words::Words;

/// The options as they came.
#[derive(Clone, Copy)]
pub(crate) struct Given<'a, 'py> {
    pub(crate) skip_tokens: Arg<'a, 'py>,
    pub(crate) partial: bool,
    pub(crate) layers: Arg<'a, 'py>,
    pub(crate) by_layer: bool,
    pub(crate) after: Arg<'a, 'py>,
    pub(crate) slab_tokens: Arg<'a, 'py>,
    pub(crate) fingerprint: Arg<'a, 'py>,
    pub(crate) raw: bool,
    pub(crate) stream: Arg<'a, 'py>,
}

/// What every slab of a call has in common.
pub(crate) struct Options {
    skip: u64,
    partial: bool,
    layers: Option<(u32, u32)>,
    /// Layer by layer, each after its event; `None`: all layers at once.
    pub(crate) by_layer: Option<Vec<Option<Event>>>,
    tokens: Option<u64>,
    fingerprint: Option<u64>,
    raw: bool,
}

impl Given<'_, '_> {
    /// The options, for a cache of `layers` layers. What must outlive the transfer goes to `keep`.
    pub(crate) fn read(&self, layers: u64, keep: &mut Keep) -> Result<Options> {
        match self {
            // As most calls are.
            Given {
                skip_tokens: None,
                layers: None,
                by_layer: false,
                after: None,
                fingerprint: None,
                ..
            } => Ok(Options {
                skip: 0,
                partial: self.partial,
                layers: None,
                by_layer: None,
                tokens: args::optional(self.slab_tokens, "slab_tokens")?,
                fingerprint: None,
                raw: self.raw,
            }),
            _ => self.read_all(layers, keep),
        }
    }

    #[inline(never)]
    fn read_all(&self, layers: u64, keep: &mut Keep) -> Result<Options> {
        let fingerprint = self.fingerprint.filter(|f| !f.is_none());
        let fingerprint = fingerprint.map(|f| f.extract::<u64>()).transpose();
        let after = self.after.filter(|a| !a.is_none());
        let events = after.map(|after| events(after, layers, keep)).transpose()?;
        Ok(Options {
            skip: self.skip_tokens.map_or(Ok(0), |s| args::count(s, "skip_tokens"))?,
            partial: self.partial,
            layers: self.layers.filter(|l| !l.is_none()).map(layer_range).transpose()?,
            by_layer: events.or_else(|| self.by_layer.then(Vec::new)),
            tokens: args::optional(self.slab_tokens, "slab_tokens")?,
            fingerprint: fingerprint
                .map_err(|_| Fault::wrong_type("fingerprint is no unsigned 64-bit int"))?,
            raw: self.raw,
        })
    }
}

/// A layer, `(first, count)`, or a range.
fn layer_range(object: &Bound<'_, PyAny>) -> Result<(u32, u32)> {
    let fit = |n: u64, name: &str| {
        u32::try_from(n).map_err(|_| Fault::value(format!("{name} is {n}, beyond 32 bits")))
    };
    if let Ok(range) = object.cast::<PyRange>() {
        let (start, stop) = (range.getattr("start")?, range.getattr("stop")?);
        let (start, stop) = (args::count(&start, "layers.start")?, args::count(&stop, "layers.stop")?);
        if range.getattr("step")?.extract::<i64>()? != 1 || stop <= start {
            return Err(Fault::value(format!(
                "layers is {}; a range of at least one layer with step 1 is needed",
                range.str()?
            ))
            .into());
        }
        return Ok((fit(start, "layers.start")?, fit(stop - start, "layers")?));
    }
    if let Ok((first, count)) = object.extract::<(Bound<'_, PyAny>, Bound<'_, PyAny>)>() {
        return Ok((
            fit(args::count(&first, "layers[0]")?, "layers[0]")?,
            fit(args::positive(&count, "layers[1]")?, "layers[1]")?,
        ));
    }
    Ok((fit(args::count(object, "layers")?, "layers")?, 1))
}

/// Per layer of the cache the event it waits for, or none. The event objects go to `keep`: what they stand for is
/// destroyed with them.
fn events(after: &Bound<'_, PyAny>, layers: u64, keep: &mut Keep) -> Result<Vec<Option<Event>>> {
    let items = after.try_iter().map_err(|_| {
        let found = args::a(&args::type_name(after));
        Fault::wrong_type(format!("after is {found}; a list is needed, an event or None a layer"))
    })?;
    let mut events = Vec::new();
    for item in items {
        let item = item?;
        if events.len() as u64 == layers {
            let message = format!("after has more than {layers} items; the cache has {layers} layers");
            return Err(Fault::value(message).into());
        }
        if item.is_none() {
            events.push(None);
            continue;
        }
        let name = format!("after[{}]", events.len());
        let handle = event_handle(&item, &name)?;
        if handle == 0 {
            return Err(Fault::value(format!(
                "{name} is an event without a handle: it was never recorded (torch creates an event when it is first \
                 recorded); record it on the stream that it stands for before this call"
            ))
            .into());
        }
        // SAFETY: a live event of the device, recorded before, as the caller states; the object that owns it is
        // kept until the transfer is over.
        events.push(Some(unsafe { Event::cuda(handle) }));
        keep.push(item.unbind());
    }
    Ok(events)
}

/// Slots and slab as they came.
pub(crate) type Pair<'a, 'py> = (&'a Bound<'py, PyAny>, &'a Bound<'py, PyAny>);

/// One slab of a call.
pub(crate) struct Item<'a> {
    slots: SlotMapping,
    slab: SlabSource<'a>,
    tokens: Option<u64>,
}

enum SlabSource<'a> {
    Ours(&'a Slab),
    Array(Foreign),
}

impl<'a> Item<'a> {
    /// Reads a slab and its slots for an engine of `place`. What must outlive the transfer goes to `keep`.
    pub(crate) fn read(
        cache: &PyPagedCache,
        (slots, slab): Pair<'a, '_>,
        (direction, place): (Direction, Place),
        options: &Options,
        keep: &mut Keep,
    ) -> Result<Self> {
        let (slots, slots_owner) = Words::of(slots, "slots")?.slots("slots", place)?;
        keep.extend(slots_owner);
        let stores = direction == Direction::Gather;
        // It has no subclasses.
        if let Ok(ours) = slab.cast_exact::<PySlab>() {
            let ours = ours.get().slab();
            if stores && ours.is_read_only() {
                return Err(Fault::value("slab is read-only and would be written").into());
            }
            return Ok(Item { slots, slab: SlabSource::Ours(ours), tokens: options.tokens });
        }
        let tensor = Tensor::of(slab, "slab")?;
        if stores && tensor.read_only {
            return Err(Fault::value("slab is read-only and would be written").into());
        }
        if !tensor.is_contiguous() {
            return Err(Fault::value(format!("slab has {tensor}; it must be contiguous")).into());
        }
        if let Place::Cuda(_) = tensor.place {
            tensor.expect_place("slab", place)?;
        }
        let wanted = cache.paged().layout().dtype();
        let found = tensor.element.kv().map_err(|e| e.of("slab"))?;
        if !options.raw && !found.moves_as(wanted) {
            let message = format!(
                "the slab holds {found}, the paged cache {wanted}; pass raw=True to move bytes regardless"
            );
            return Err(Fault { kind: "dtype_mismatch", message }.into());
        }
        let tokens = options.tokens.or(match tensor.rank() {
            4 => Some(tokens_of_shape(&tensor, cache, found.size())?),
            _ => None,
        });
        let bytes = tensor
            .count()?
            .checked_mul(found.size())
            .ok_or_else(|| Fault::overflow("the slab's size does not fit 64 bits"))?;
        let slab = SlabSource::Array(tensor.foreign(slab.py(), place, bytes));
        keep.push(tensor.owner);
        Ok(Item { slots, slab, tokens })
    }

    /// As the transfer library takes it. The GIL need not be held.
    pub(crate) fn request(
        self,
        cache: &RegisteredCache,
        (direction, place): (Direction, Place),
        options: &Options,
        stream: Stream,
    ) -> std::result::Result<TransferRequest, Fault> {
        let slab = self.slab.open(place)?;
        let request = match direction {
            Direction::Gather => TransferRequest::gather(cache, self.slots, &slab),
            Direction::Scatter => TransferRequest::scatter(cache, self.slots, &slab),
        };
        let mut request = request.skip_tokens(options.skip).partial(options.partial).on(stream);
        if let Some(tokens) = self.tokens {
            request = request.slab_tokens(tokens);
        }
        if let Some((first, count)) = options.layers {
            request = request.layers(first, count);
        }
        if let Some(fingerprint) = options.fingerprint {
            request = request.stored_as(Fingerprint(fingerprint));
        }
        Ok(request)
    }
}

impl<'a> SlabSource<'a> {
    fn open(self, place: Place) -> std::result::Result<Cow<'a, Slab>, Fault> {
        match self {
            SlabSource::Ours(slab) => Ok(Cow::Borrowed(slab)),
            SlabSource::Array(foreign) => {
                process().memory.slab(place, foreign).map(Cow::Owned).map_err(|e| e.of("slab"))
            }
        }
    }
}

/// A slab given with its shape must have the cache's.
fn tokens_of_shape(tensor: &Tensor, cache: &PyPagedCache, element: u64) -> std::result::Result<u64, Fault> {
    let paged = cache.paged();
    let row = paged.layout().token_bytes();
    let needed = [paged.planes(), paged.layers(), row / element.max(1)];
    let found = [tensor.len_of(0), tensor.len_of(1), tensor.len_of(3)];
    match found == needed && row.is_multiple_of(element.max(1)) {
        true => Ok(tensor.len_of(2)),
        false => Err(Fault {
            kind: "layout_mismatch",
            message: format!(
                "slab has shape {:?}; ({}, {}, tokens, {}) is needed",
                tensor.shape, needed[0], needed[1], needed[2]
            ),
        }),
    }
}

/// `(slots, slab)` pairs.
pub(crate) fn pairs<'py>(items: &Bound<'py, PyAny>) -> Result<Vec<(Bound<'py, PyAny>, Bound<'py, PyAny>)>> {
    let wrong = || Fault::wrong_type("items must be a list of (slots, slab) pairs");
    let mut pairs = Vec::new();
    for item in items.try_iter().map_err(|_| wrong())? {
        pairs.push(item?.extract::<(Bound<'py, PyAny>, Bound<'py, PyAny>)>().map_err(|_| wrong())?);
    }
    Ok(pairs)
}
