//! Reading one table key by key: what is taken is typed and in range, what is left over is an
//! unknown key.

use super::choice::Words;
use super::error::ConfigError;
use super::limit::Limit;
use super::node::{Node, Sources, Value, joined, quoted};
use super::size::{SIZE_FORM, human, parse_size};

/// A table being read.
#[derive(Debug)]
pub(crate) struct Section {
    /// The path as written.
    path: String,
    /// The path in the TOML form, which checks use.
    canonical: String,
    line: Option<u32>,
    entries: Vec<(String, Node)>,
    known: Vec<&'static str>,
}

impl Section {
    /// `canonical` is the path in the TOML form; it differs from the node's own only for the
    /// flat dict form.
    pub(crate) fn new(
        node: Node,
        canonical: &str,
        allowed: &str,
        sources: &mut Sources,
    ) -> Result<Self, ConfigError> {
        sources.note(canonical.to_owned(), &node);
        match node.value {
            Value::Table(entries) => Ok(Section {
                path: node.path,
                canonical: canonical.to_owned(),
                line: node.line,
                entries,
                known: Vec::new(),
            }),
            _ => Err(wrong_type(&node, allowed, sources)),
        }
    }

    fn canonical(&self, key: &str) -> String {
        joined(&self.canonical, key)
    }

    /// The value of `key`, which from now on counts as known.
    pub(crate) fn take(&mut self, key: &'static str, sources: &mut Sources) -> Option<Node> {
        self.known.push(key);
        let at = self.entries.iter().position(|(name, _)| name == key)?;
        let (_, node) = self.entries.remove(at);
        sources.note(self.canonical(key), &node);
        Some(node)
    }

    pub(crate) fn boolean(
        &mut self,
        key: &'static str,
        sources: &mut Sources,
    ) -> Result<Option<bool>, ConfigError> {
        let Some(node) = self.take(key, sources) else {
            return Ok(None);
        };
        match node.value {
            Value::Bool(b) => Ok(Some(b)),
            _ => Err(wrong_type(&node, "true | false", sources)),
        }
    }

    pub(crate) fn text(
        &mut self,
        key: &'static str,
        allowed: &str,
        sources: &mut Sources,
    ) -> Result<Option<String>, ConfigError> {
        let Some(node) = self.take(key, sources) else {
            return Ok(None);
        };
        match node.value {
            Value::Text(text) => Ok(Some(text)),
            _ => Err(wrong_type(&node, allowed, sources)),
        }
    }

    pub(super) fn word<T: Words>(
        &mut self,
        key: &'static str,
        sources: &mut Sources,
    ) -> Result<Option<T>, ConfigError> {
        let canonical = self.canonical(key);
        let Some(word) = self.text(key, T::ALLOWED, sources)? else {
            return Ok(None);
        };
        match T::from_word(&word) {
            Some(value) => Ok(Some(value)),
            None => Err(ConfigError::invalid(canonical, quoted(&word), T::ALLOWED).located(sources)),
        }
    }

    /// A number that is no size.
    pub(crate) fn count(
        &mut self,
        key: &'static str,
        limit: Limit,
        sources: &mut Sources,
    ) -> Result<Option<u32>, ConfigError> {
        let Some(node) = self.take(key, sources) else {
            return Ok(None);
        };
        let value = match node.value {
            Value::Integer(i) => u64::try_from(i).ok(),
            Value::BigInteger(_) => None,
            _ => return Err(wrong_type(&node, &limit.allowed(), sources)),
        };
        match value.filter(|v| limit.holds(*v)).map(u32::try_from) {
            Some(Ok(count)) => Ok(Some(count)),
            _ => {
                Err(ConfigError::invalid(self.canonical(key), node.describe(), limit.allowed())
                    .located(sources))
            }
        }
    }

    /// A number of bytes, as an integer or as text.
    pub(crate) fn size(
        &mut self,
        key: &'static str,
        limit: Limit,
        sources: &mut Sources,
    ) -> Result<Option<u64>, ConfigError> {
        let Some(node) = self.take(key, sources) else {
            return Ok(None);
        };
        let canonical = self.canonical(key);
        let refuse = |found: String, sources: &Sources| {
            let allowed = format!("{}, as {SIZE_FORM}", limit.allowed());
            Err(ConfigError::invalid(canonical, found, allowed).located(sources))
        };
        let bytes = match &node.value {
            Value::Integer(i) => match u64::try_from(*i) {
                Ok(bytes) => bytes,
                Err(_) => return refuse(node.describe(), sources),
            },
            Value::BigInteger(_) => return refuse(node.describe(), sources),
            Value::Text(text) => match parse_size(text) {
                Ok(bytes) => bytes,
                Err(fault) => return refuse(format!("{} ({fault})", node.describe()), sources),
            },
            _ => return Err(wrong_type(&node, SIZE_FORM, sources)),
        };
        if limit.holds(bytes) {
            return Ok(Some(bytes));
        }
        let found = match &node.value {
            Value::Text(_) => format!("{} = {}", node.describe(), human(bytes)),
            _ => human(bytes),
        };
        refuse(found, sources)
    }

    /// Ends the reading: whatever was not taken is an unknown key.
    pub(crate) fn finish(self, sources: &Sources) -> Result<Done, ConfigError> {
        let Some((name, node)) = self.entries.first() else {
            return Ok(Done { path: self.path, line: self.line });
        };
        Err(ConfigError::UnknownKey {
            at: sources.location(node.line),
            key: node.path.clone(),
            hint: hint(name, &self.canonical, &self.known),
            known: self.known.join(", "),
        })
    }
}

/// A section read to the end. Absent keys are looked for only now, so that a misspelt key is
/// reported as itself, not as the absence of the key it was meant to be.
#[derive(Debug)]
pub(crate) struct Done {
    path: String,
    line: Option<u32>,
}

impl Done {
    /// The path a key of this section would be written under.
    fn key(&self, key: &str) -> String {
        if self.path == super::dict::FLAT_POOL {
            format!("{}_{key}", self.path)
        } else {
            joined(&self.path, key)
        }
    }

    pub(crate) fn missing(&self, key: &str, allowed: &str, sources: &Sources) -> ConfigError {
        ConfigError::MissingKey {
            at: sources.location(self.line),
            key: self.key(key),
            allowed: allowed.to_owned(),
        }
    }
}

pub(super) fn wrong_type(node: &Node, allowed: &str, sources: &Sources) -> ConfigError {
    ConfigError::WrongType {
        at: sources.location(node.line),
        key: node.path.clone(),
        found: node.describe(),
        allowed: allowed.to_owned(),
    }
}

/// Which keys live where, for "belongs in" hints. A test keeps it complete.
const HOMES: [(&str, &[&str]); 4] = [
    ("transfer", super::transfer::KEYS),
    ("cxl", super::cxl::KEYS),
    ("[cxl.pool]", super::cxl::POOL_KEYS),
    ("index", super::index::KEYS),
];

fn hint(name: &str, section: &str, known: &[&str]) -> String {
    if let Some(near) = nearest(name, known) {
        return format!(", did you mean `{near}`?");
    }
    let homes: Vec<String> = HOMES
        .iter()
        .filter(|(home, keys)| *home != section && keys.contains(&name))
        .map(|(home, _)| format!("[{home}]"))
        .collect();
    if homes.is_empty() { String::new() } else { format!(", it belongs in {}", homes.join(" or ")) }
}

/// The word closest to `name`, at most two edits away and fewer than half its letters.
pub(super) fn nearest<'a>(name: &str, words: &[&'a str]) -> Option<&'a str> {
    words
        .iter()
        .map(|word| (edits(name, word), *word))
        .filter(|(n, word)| *n <= 2 && 2 * n < word.len())
        .min_by_key(|(n, _)| *n)
        .map(|(_, word)| word)
}

/// Edit distance; names far longer than any key count as far away.
fn edits(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().take(64).collect(), b.chars().collect());
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let substituted = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::HOMES;
    use crate::config::{Config, ConfigError};

    #[test]
    fn the_key_lists_of_hints_are_the_keys_that_are_read() {
        for (home, keys) in HOMES {
            let text = format!("[{home}]\nzzzzzzzzzz = 1");
            let Err(ConfigError::UnknownKey { known, .. }) = Config::from_toml_str(&text, "x") else {
                panic!("{text}");
            };
            let mut known: Vec<&str> = known.split(", ").collect();
            let mut keys = keys.to_vec();
            known.sort_unstable();
            keys.sort_unstable();
            assert_eq!(known, keys, "{home}");
        }
    }
}
