//! The answer of `maru p2p`, for people and for programs.

use serde_json::json;

use crate::output::{Line, Outcome, human_bytes};
use crate::p2p::job::Job;
use crate::p2p::protocol::{Loaded, Stored, Transfers};

/// What is known at the end; one side alone knows its own part.
#[derive(Debug)]
pub(crate) struct Report<'a> {
    pub(crate) job: &'a Job,
    pub(crate) stored: Option<Stored>,
    pub(crate) loaded: Option<Loaded>,
}

impl Report<'_> {
    pub(crate) fn outcome(&self) -> Outcome {
        let (hit, verified) = (self.hit(), self.verified());
        let transfers = self.transfers();
        let text = |f: fn(&Transfers) -> &String| transfers.map(f).cloned();
        let backend = text(|t| &t.backend).or_else(|| self.loaded.as_ref().map(|l| l.backend.clone()));
        let device = text(|t| &t.device).or_else(|| self.loaded.as_ref().map(|l| l.device.clone()));
        let json = json!({
            "cache_hit": hit,
            "verified": verified,
            "bytes": transfers.map_or(0, |t| t.bytes),
            "store_gbps": self.stored.as_ref().and_then(|s| gbps(&s.transfers)),
            "load_gbps": self.load().and_then(gbps),
            "backend": backend,
            "strategy": text(|t| &t.strategy),
            "device": device,
            "first_difference": self.loaded.as_ref().and_then(|l| l.first_difference),
        });
        let success = hit != Some(false) && verified != Some(false);
        Outcome { json, human: self.human(), success }
    }

    /// Whether every chunk was found; nothing where nobody looked.
    fn hit(&self) -> Option<bool> {
        self.loaded.as_ref().map(|l| l.found == l.chunks)
    }

    /// Whether every byte was right; a miss has verified nothing.
    fn verified(&self) -> Option<bool> {
        self.loaded.as_ref().map(|l| l.transfers.is_some() && l.first_difference.is_none())
    }

    fn load(&self) -> Option<&Transfers> {
        self.loaded.as_ref()?.transfers.as_ref()
    }

    /// Both sides move the same bytes in the same way; the later one counts.
    fn transfers(&self) -> Option<&Transfers> {
        self.load().or(self.stored.as_ref().map(|s| &s.transfers))
    }

    fn human(&self) -> Vec<Line> {
        let mut lines = vec![Line::Title(format!(
            "{}, {} tokens{}",
            self.job.profile,
            self.job.tokens,
            self.transfers().map_or(String::new(), |t| format!(
                ", {} ({} bytes)",
                human_bytes(t.bytes),
                t.bytes
            ))
        ))];
        let mut fact = |name: &str, value: String| lines.push(Line::plain(format!("  {name:<9} {value}")));
        fact("pool", self.job.pool.display().to_string());
        if let Some(t) = self.transfers() {
            fact("backend", format!("{} ({}), cache on {}", t.backend, t.strategy, t.device));
        }
        if let Some(stored) = &self.stored {
            fact("store", speed(&stored.transfers));
        }
        if let Some(load) = self.load() {
            fact("load", speed(load));
        }
        match &self.loaded {
            Some(loaded) => lines.extend(verdicts(loaded)),
            None => {
                if let Some(stored) = &self.stored {
                    lines.push(Line::Verdict(format!("Stored: {} chunk(s)", stored.chunks), true));
                    lines.push(Line::plain("  to load them: the same command with --role consumer"));
                }
            }
        }
        lines
    }
}

fn verdicts(loaded: &Loaded) -> Vec<Line> {
    if loaded.found < loaded.chunks {
        let part = format!("Cache Hit: No ({} of {} chunks found)", loaded.found, loaded.chunks);
        return vec![Line::Verdict(part, false)];
    }
    let mut lines = vec![Line::Verdict("Cache Hit: Yes".to_owned(), true)];
    match loaded.first_difference {
        None => lines.push(Line::Verdict("Output verified: Yes".to_owned(), true)),
        Some(d) => {
            lines.push(Line::Verdict("Output verified: No".to_owned(), false));
            lines.push(Line::plain(format!(
                "  first wrong byte: layer {}, {}, token {}, head {}, byte {}",
                d.layer,
                if d.kv == 0 { "K" } else { "V" },
                d.token,
                d.head,
                d.byte
            )));
        }
    }
    lines
}

/// 10^9 bytes a second; nothing where no time passed.
fn gbps(transfers: &Transfers) -> Option<f64> {
    (transfers.seconds > 0.0).then(|| {
        let gbps = transfers.bytes as f64 / transfers.seconds / 1e9;
        (gbps * 1000.0).round() / 1000.0
    })
}

fn speed(transfers: &Transfers) -> String {
    gbps(transfers).map_or("too short to time".to_owned(), |gbps| format!("{gbps:.2} GB/s"))
}
