//! `plots DIR`: the pictures of a record, from its dated CSV files alone; they lie beside them.

mod charts;
mod figure;
mod scale;
mod table;

use std::fs;
use std::path::{Path, PathBuf};

use crate::Outcome;
use table::Table;

/// Draws every CSV file of the folder. Pictures of an earlier run of the same file are removed first, so that none
/// stays that its file no longer gives.
pub(crate) fn run(folder: &Path) -> Outcome {
    let files = |extension: &str| -> Result<Vec<PathBuf>, String> {
        let entries = fs::read_dir(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
        let paths = entries.filter_map(Result::ok).map(|entry| entry.path());
        let mut files: Vec<_> = paths.filter(|p| p.extension().is_some_and(|e| e == extension)).collect();
        files.sort();
        Ok(files)
    };
    let tables = files("csv")?;
    if tables.is_empty() {
        return Err(format!("{}: there are no .csv files", folder.display()).into());
    }
    let device = device(folder);
    for path in tables {
        let table = Table::read(&path)?;
        let Some(figures) = charts::figures(&table, &device) else {
            println!("{}: no picture of such columns: {}", path.display(), table.columns.join(","));
            continue;
        };
        let prefix = format!("{}.", table.stem);
        let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        for old in files("svg")?.iter().filter(|old| name(old).starts_with(&prefix)) {
            fs::remove_file(old).map_err(|e| format!("{}: {e}", old.display()))?;
        }
        for figure in figures {
            let to = folder.join(format!("{prefix}{}.svg", figure.name));
            fs::write(&to, figure.svg()?).map_err(|e| format!("{}: {e}", to.display()))?;
            println!("{}", to.display());
        }
    }
    Ok(())
}

/// What the record is of, for files that do not say it: the title of its README, "Records of an …".
fn device(folder: &Path) -> String {
    let readme = fs::read_to_string(folder.join("README.md")).unwrap_or_default();
    let title = readme.lines().next().unwrap_or_default().trim_start_matches('#').trim();
    let device = title.strip_prefix("Records of ").unwrap_or(title);
    let device = device.strip_prefix("an ").or_else(|| device.strip_prefix("a ")).unwrap_or(device);
    if device.is_empty() { "device not named".to_owned() } else { device.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_of_the_record_is_drawn() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the repository");
        let record = root.join("benches/record/h200");
        assert_eq!(device(&record), "NVIDIA H200");
        let folder = std::env::temp_dir().join(format!("maru-plots-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder");
        let mut stems = Vec::new();
        for entry in fs::read_dir(&record).expect("the record").filter_map(Result::ok) {
            if entry.path().extension().is_some_and(|e| e == "csv") {
                fs::copy(entry.path(), folder.join(entry.file_name())).expect("a copy");
                stems.extend(entry.path().file_stem().map(|stem| stem.to_string_lossy().into_owned()));
            }
        }
        for stem in &stems {
            fs::write(folder.join(format!("{stem}.gone.svg")), "").expect("an old picture");
        }
        let outcome = run(&folder);
        let names: Vec<String> = fs::read_dir(&folder)
            .expect("the folder")
            .filter_map(Result::ok)
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .filter(|name| name.ends_with(".svg"))
            .collect();
        fs::remove_dir_all(&folder).expect("removed");
        outcome.expect("drawn");
        assert!(!stems.is_empty() && !names.iter().any(|name| name.ends_with(".gone.svg")), "{names:?}");
        for stem in &stems {
            assert!(names.iter().any(|name| name.starts_with(&format!("{stem}."))), "{stem}: {names:?}");
        }
        for picture in [
            "throughput",
            "latency",
            "cpu",
            "submit",
            "layers",
            "profiles-load",
            "profiles-store",
            "slowdown",
        ] {
            assert!(names.iter().any(|n| n.ends_with(&format!(".{picture}.svg"))), "{picture}: {names:?}");
        }
    }

    #[test]
    fn a_folder_without_numbers_is_an_error() {
        let nowhere = Path::new("/no/such/folder");
        assert!(run(nowhere).is_err_and(|e| e.to_string().contains("/no/such/folder")));
    }
}
