//! Small readers of the kernel's text files. What cannot be read is absent.

use std::path::Path;

/// A file's text without the white space around it.
pub(crate) fn text(path: &Path) -> Option<String> {
    // These files are small; a huge one is none of the kernel's.
    const MOST: u64 = 1 << 20;
    use std::io::Read as _;
    let mut bytes = Vec::new();
    std::fs::File::open(path).ok()?.take(MOST).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).trim().to_owned())
}

/// A file that holds one number.
pub(crate) fn number<T: std::str::FromStr>(path: &Path) -> Option<T> {
    text(path)?.parse().ok()
}

/// The value of `name:` in a file like /proc/meminfo, in bytes if it is given in kB.
pub(crate) fn field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.split_whitespace().last() == Some(name)).then_some(value)
    })?;
    let mut words = line.split_whitespace();
    let value: u64 = words.next()?.parse().ok()?;
    match words.next() {
        Some("kB") => value.checked_mul(1024),
        _ => Some(value),
    }
}

/// The word in brackets of a file like `always [madvise] never`.
pub(crate) fn chosen(path: &Path) -> Option<String> {
    let text = text(path)?;
    let (_, rest) = text.split_once('[')?;
    Some(rest.split_once(']')?.0.to_owned())
}

/// Names in a directory, sorted.
pub(crate) fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).map(|d| d.flatten().collect()).unwrap_or_else(|_| Vec::new());
    let mut names: Vec<String> =
        entries.iter().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_with_and_without_units() {
        let text = "MemTotal:       16 kB\nHugePages_Total:       3\nNode 0 MemFree:   2 kB\nBad: x kB";
        assert_eq!(field(text, "MemTotal"), Some(16 << 10));
        assert_eq!(field(text, "HugePages_Total"), Some(3));
        assert_eq!(field(text, "MemFree"), Some(2 << 10));
        assert_eq!((field(text, "Bad"), field(text, "Absent")), (None, None));
        assert_eq!(field("A: 18446744073709551615 kB", "A"), None);
    }

    #[test]
    fn what_is_not_there_is_absent() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(text(&dir.path().join("x")), None);
        assert_eq!(number::<i32>(dir.path()), None);
        assert!(names(&dir.path().join("x")).is_empty());
        std::fs::write(dir.path().join("thp"), "always [madvise] never\n").unwrap();
        assert_eq!(chosen(&dir.path().join("thp")).as_deref(), Some("madvise"));
        std::fs::write(dir.path().join("thp"), "always [").unwrap();
        assert_eq!(chosen(&dir.path().join("thp")), None);
    }
}
