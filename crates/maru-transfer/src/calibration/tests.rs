//! The pure parts: what follows from times, files, directories.

use std::ffi::OsStr;
use std::path::Path;

use maru_layout::Direction::{Gather, Scatter};
use proptest::prelude::*;

use super::*;

const MIB: u64 = 1 << 20;

/// Samples of the smallest sizes: direct, staged and driver copies.
fn samples(times: &[(f64, f64, f64)]) -> Vec<Sample> {
    let sample = |(size, time): (&(u64, u32), &(f64, f64, f64))| {
        Sample::new(size.0, 1.0, time.0, Some(time.1), Some(time.2))
    };
    SIZES.iter().zip(times).map(sample).collect()
}

fn staged_from(times: &[(f64, f64)]) -> u64 {
    let times: Vec<_> = times.iter().map(|(direct, staged)| (*direct, *staged, 1e6)).collect();
    Row::new(Scatter, RUNS[1], samples(&times)).staged_from()
}

fn copies(times: &[(f64, f64, f64)]) -> Option<(u64, u64)> {
    Row::new(Scatter, RUNS[1], samples(times)).copy_engine()
}

fn identity() -> Identity {
    Identity {
        device: "A \"device\"".into(),
        uuid: "GPU-01020304-0506-0708-090a-0b0c0d0e0f10".into(),
        driver: "13.0-580.95.05".into(),
        library: env!("CARGO_PKG_VERSION").into(),
        kernel: "portable PTX (…)".into(),
        ring_bytes: 128 << 20,
        sm_budget: 4,
    }
}

fn ahead(n: usize) -> Vec<(f64, f64)> {
    (0..6).map(|i| if i < n { (100.0, 120.0) } else { (100.0, 97.0) }).collect()
}

#[test]
fn staged_begins_where_it_is_ahead_for_good() {
    for (n, (bytes, _)) in SIZES.iter().enumerate() {
        assert_eq!(staged_from(&ahead(n)), *bytes);
    }
    assert_eq!(staged_from(&ahead(6)), u64::MAX, "never ahead: direct always");
}

#[test]
fn it_may_be_little_behind_at_no_size_from_there_on() {
    let mut times = ahead(1);
    assert_eq!(staged_from(&times), 4 * MIB);
    // A little more than 2 % at 8 MiB, than 5 % at 16.
    times[2].1 = 102.1;
    assert_eq!(staged_from(&times), 16 * MIB);
    times[2].1 = 101.9;
    assert_eq!(staged_from(&times), 4 * MIB);
    times[3].1 = 104.9;
    assert_eq!(staged_from(&times), 4 * MIB);
    times[3].1 = 105.1;
    assert_eq!(staged_from(&times), 32 * MIB);
    times[3].1 = 101.0;
    // A lucky small one before a bad one is luck.
    (times[0].1, times[1].1) = (10.0, 105.0);
    assert_eq!(staged_from(&times), 8 * MIB);
    // So is a bad largest one behind a good one; two in a row are not.
    times[5].1 = 110.0;
    assert_eq!(staged_from(&times), 8 * MIB);
    times[4].1 = 106.0;
    assert_eq!(staged_from(&times), u64::MAX);
}

#[test]
fn what_there_was_no_time_for_keeps_the_default() {
    assert_eq!(staged_from(&[]), STAGE_FROM);
    // Ahead from 4 MiB on as far as it was measured.
    assert_eq!(staged_from(&ahead(1)[..3]), 4 * MIB);
    // Behind up to 8 MiB, not known beyond.
    assert_eq!(staged_from(&ahead(6)[..3]), STAGE_FROM);
    // Behind at 16 MiB, where the default would stage.
    assert_eq!(staged_from(&ahead(6)[..4]), 32 * MIB);
    assert_eq!(staged_from(&ahead(6)[..5]), 64 * MIB);
}

#[test]
fn a_ring_that_could_not_stage_is_never_chosen() {
    let all = SIZES.iter().map(|(bytes, _)| Sample::new(*bytes, 1.0, 2.0, None, None)).collect();
    let row = Row::new(Gather, RUNS[0], all);
    assert_eq!((row.staged_from(), row.copy_engine()), (u64::MAX, None));
}

#[test]
fn driver_copies_are_chosen_between_sizes_they_won() {
    let (lost, won) = ((2.0, 2.0, 3.0), (2.0, 3.0, 2.0));
    assert_eq!(copies(&[lost; 6]), None);
    assert_eq!(copies(&[won; 6]), Some((MIB, 64 * MIB)));
    assert_eq!(copies(&[lost, won, won, lost, won, lost]), Some((4 * MIB, 8 * MIB)));
    // The first of equals.
    assert_eq!(copies(&[lost, won, lost, won, lost, lost]), Some((4 * MIB, 4 * MIB)));
    // As fast as both others, not one of them.
    assert_eq!(copies(&[(2.0, 4.0, 3.0), (4.0, 2.0, 3.0), (3.0, 3.0, 3.0)]), Some((8 * MIB, 8 * MIB)));
    let without = SIZES.iter().map(|(bytes, _)| Sample::new(*bytes, 1.0, 2.0, Some(2.0), None)).collect();
    assert_eq!(Row::new(Gather, RUNS[1], without).copy_engine(), None);
}

#[test]
fn every_direction_and_run_goes_by_its_own_row() {
    let row = |direction, run, n| {
        let times: Vec<_> = ahead(n).iter().map(|(d, s)| (*d, *s, if n == 2 { 1.0 } else { 1e6 })).collect();
        Row::new(direction, run, samples(&times))
    };
    let rows = vec![
        row(Scatter, RUNS[0], 1),
        row(Scatter, RUNS[1], 2),
        row(Gather, RUNS[0], 3),
        // Stores of long runs were not measured.
    ];
    let c = Calibration::of_rows(identity(), rows);
    for (direction, run, from) in [
        (Scatter, 0, 4 * MIB),
        (Scatter, RUNS[0], 4 * MIB),
        (Scatter, 2047, 4 * MIB),
        (Scatter, 2048, 8 * MIB),
        (Scatter, u64::MAX, 8 * MIB),
        (Gather, RUNS[0], 16 * MIB),
        (Gather, RUNS[1], STAGE_FROM),
    ] {
        assert_eq!(c.staged_from(direction, run), from, "{direction:?} {run}");
        assert_eq!(c.choose(from, run, direction, false), Choice::Staged);
        assert_eq!(c.choose(from - 1, run, direction, false), Choice::Direct);
    }
    assert!(c.uses_copy_engine());
    for (bytes, run, spaced, choice) in [
        (MIB, RUNS[1], true, Choice::CopyEngine),
        (64 * MIB, RUNS[1], true, Choice::CopyEngine),
        (64 * MIB + 1, RUNS[1], true, Choice::Staged),
        (MIB - 1, RUNS[1], true, Choice::Direct),
        (MIB, RUNS[1], false, Choice::Direct),
        (MIB, RUNS[1] - 1, true, Choice::Direct),
        (64 * MIB, 2048, true, Choice::Staged),
    ] {
        assert_eq!(c.choose(bytes, run, Scatter, spaced), choice, "{bytes} {run} {spaced}");
    }
}

#[test]
fn defaults_are_those_of_the_documentation() {
    let c = Calibration::built_in("because");
    assert_eq!(STAGE_FROM, 16 * MIB);
    for direction in [Scatter, Gather] {
        for run in RUNS {
            assert_eq!(c.choose(STAGE_FROM - 1, run, direction, true), Choice::Direct);
            assert_eq!(c.choose(STAGE_FROM, run, direction, true), Choice::Staged);
        }
    }
}

fn stored() -> Stored {
    let all = [(100.0, 95.25, 90.0), (100.0, 100.0, 1e3)];
    Stored::new(
        identity(),
        vec![Row::new(Scatter, RUNS[1], samples(&all)), Row::new(Gather, RUNS[0], samples(&all[..1]))],
    )
}

#[test]
fn a_file_comes_back_as_it_was_written() {
    let stored = stored();
    let text = stored.to_toml().unwrap();
    assert_eq!(Stored::from_toml(&text, &identity()).unwrap(), stored);
    // Whichever kernel, for those who only look.
    let any = Identity { kernel: String::new(), ..identity() };
    assert_eq!(Stored::from_toml(&text, &any).unwrap(), stored);
    // Keys of a later version of the same format do no harm.
    let more = text.replacen("[identity]", "[identity]\nfuture = 1", 1);
    assert_eq!(Stored::from_toml(&more, &identity()).unwrap(), stored);
}

#[test]
fn files_of_others_are_not_used() {
    let text = stored().to_toml().unwrap();
    type Change = fn(&mut Identity);
    let changes: [Change; 7] = [
        |i| i.device.push('x'),
        |i| i.uuid.push('x'),
        |i| i.driver.push('x'),
        |i| i.library.push('x'),
        |i| i.kernel.push('x'),
        |i| i.ring_bytes += 1,
        |i| i.sm_budget += 1,
    ];
    for change in changes {
        let mut wanted = identity();
        change(&mut wanted);
        assert_eq!(Stored::from_toml(&text, &wanted), Err(Unusable::Foreign));
    }
}

#[test]
fn numbers_that_cannot_be_are_not_used() {
    let good = stored();
    let check = |change: &dyn Fn(&mut Vec<Row>)| {
        let mut rows = good.rows.clone();
        change(&mut rows);
        let text = Stored::new(identity(), rows).to_toml().unwrap();
        Stored::from_toml(&text, &identity())
    };
    assert!(check(&|_| ()).is_ok());
    for time in [0.0, -1.0, f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e12] {
        assert_eq!(check(&|rows| rows[0].samples[0].flat_us = time), Err(Unusable::Nonsense), "{time}");
        assert_eq!(check(&|rows| rows[0].samples[1].direct_us = time), Err(Unusable::Nonsense), "{time}");
        assert_eq!(check(&|rows| rows[1].samples[0].staged_us = Some(time)), Err(Unusable::Nonsense));
        assert_eq!(check(&|rows| rows[1].samples[0].copy_engine_us = Some(time)), Err(Unusable::Nonsense));
    }
    let nonsense = Err(Unusable::Nonsense);
    assert_eq!(check(&|rows| rows.clear()), nonsense);
    assert_eq!(check(&|rows| rows.iter_mut().for_each(|row| row.samples.clear())), nonsense);
    assert_eq!(check(&|rows| rows[0].samples.reverse()), nonsense);
    assert_eq!(check(&|rows| rows[0].samples[1].bytes = rows[0].samples[0].bytes), nonsense);
    assert_eq!(check(&|rows| rows[0].samples[1].bytes = 3), nonsense);
    assert_eq!(check(&|rows| rows[0].run_bytes = 512), nonsense);
    assert_eq!(check(&|rows| rows.push(rows[0].clone())), nonsense);
    // A sample missing in the middle: what is larger would speak for a size that was not timed.
    assert_eq!(check(&|rows| rows[0].samples = rows[0].samples[1..].to_vec()), nonsense);
}

#[test]
fn what_is_no_file_of_ours_says_why() {
    let text = stored().to_toml().unwrap();
    let reason = |text: &str| Stored::from_toml(text, &identity()).unwrap_err();
    assert_eq!(reason(&text.replacen("format = 1", "format = 7", 1)), Unusable::Format { found: 7 });
    for bad in
        ["", "format = 1", "format = \"1\"", "format = -1", "[[row]]", "\u{0}", &text[..text.len() - 3]]
    {
        assert!(matches!(reason(bad), Unusable::Unreadable { .. }), "{bad:?}: {:?}", reason(bad));
    }
    let words = text.replacen("direction = \"load\"", "direction = \"sideways\"", 1);
    assert!(reason(&words).to_string().contains("sideways"), "{}", reason(&words));
}

#[test]
fn file_names_are_plain_and_differ() {
    let name = identity().file_name();
    assert_eq!(
        name,
        "calibration-GPU-01020304-0506-0708-090a-0b0c0d0e0f10-cuda13.0-580.95.05-ring134217728-sm4.toml"
    );
    let odd = Identity { uuid: "../../x\0é\n".into(), driver: "/".repeat(500), ..identity() };
    let name = odd.file_name();
    assert!(name.len() < 250 && !name.contains(['/', '\0', '\n']), "{name}");
    assert_eq!(Path::new("/d").join(&name).parent(), Some(Path::new("/d")));
}

#[test]
fn the_cache_directory_follows_the_xdg_rules() {
    let dir = |xdg: Option<&str>, home: Option<&str>| {
        cache_dir_of(xdg.map(OsStr::new), home.map(OsStr::new)).map(|d| d.display().to_string())
    };
    assert_eq!(dir(Some("/c"), Some("/h")).as_deref(), Some("/c/maru"));
    assert_eq!(dir(None, Some("/h")).as_deref(), Some("/h/.cache/maru"));
    // Relative and empty values do not count.
    for bad in ["", "c", "./c", "~"] {
        assert_eq!(dir(Some(bad), Some("/h")).as_deref(), Some("/h/.cache/maru"));
        assert_eq!(dir(None, Some(bad)), None);
    }
    assert_eq!(dir(None, None), None);
}

fn any_sample(bytes: u64) -> impl Strategy<Value = Sample> {
    let time = 1.0..1000.0f64;
    let maybe = proptest::option::weighted(0.8, 1.0..1000.0f64);
    (time.clone(), time, maybe.clone(), maybe).prop_map(move |(f, d, s, c)| Sample::new(bytes, f, d, s, c))
}

fn any_row(direction: Direction, run: u64) -> impl Strategy<Value = Row> {
    let all: Vec<_> = SIZES.iter().map(|(bytes, _)| any_sample(*bytes)).collect();
    (all, 0..=SIZES.len()).prop_map(move |(mut samples, len)| {
        samples.truncate(len);
        Row::new(direction, run, samples)
    })
}

fn any_rows() -> impl Strategy<Value = Vec<Row>> {
    (any_row(Scatter, RUNS[0]), any_row(Scatter, RUNS[1]), any_row(Gather, RUNS[0]), any_row(Gather, RUNS[1]))
        .prop_map(|(a, b, c, d)| vec![a, b, c, d])
}

proptest! {
    #[test]
    fn more_bytes_never_go_back_to_direct(
        rows in any_rows(),
        mut bytes in proptest::collection::vec(prop_oneof![any::<u64>(), 0..128 * MIB], 2),
        run in prop_oneof![any::<u64>(), 0u64..65536],
        store in any::<bool>(),
    ) {
        let c = Calibration::of_rows(identity(), rows);
        let direction = if store { Gather } else { Scatter };
        bytes.sort_unstable();
        let choices = [0, 1].map(|i| c.choose(bytes[i], run, direction, false));
        prop_assert!(choices != [Choice::Staged, Choice::Direct], "{bytes:?} {choices:?}");
        prop_assert!(!choices.contains(&Choice::CopyEngine));
        // Even spacing adds driver copies and changes nothing else.
        for (at, plain) in bytes.iter().zip(choices) {
            let spaced = c.choose(*at, run, direction, true);
            prop_assert!(spaced == plain || spaced == Choice::CopyEngine);
            let measured = (SIZES[0].0..=SIZES[5].0).contains(at) && run >= RUNS[1];
            prop_assert!(spaced != Choice::CopyEngine || measured);
        }
    }

    #[test]
    fn noise_gives_no_absurd_threshold(rows in any_rows()) {
        for row in rows {
            let from = row.staged_from();
            prop_assert!((SIZES[0].0..=SIZES[5].0).contains(&from) || from == u64::MAX, "{from}");
            if let Some((first, last)) = row.copy_engine() {
                prop_assert!(first <= last && SIZES[0].0 <= first && last <= SIZES[5].0);
            }
        }
    }

    #[test]
    fn files_come_back(rows in any_rows()) {
        prop_assume!(rows.iter().any(|row| !row.samples.is_empty()));
        let stored = Stored::new(identity(), rows);
        let back = Stored::from_toml(&stored.to_toml().unwrap(), &identity());
        prop_assert_eq!(back, Ok(stored));
    }

    #[test]
    fn damaged_files_are_used_only_if_they_make_sense(at in 0usize..2000, byte in any::<u8>(), cut in any::<bool>()) {
        let mut bytes = stored().to_toml().unwrap().into_bytes();
        let at = at % bytes.len();
        if cut {
            bytes.truncate(at);
        } else {
            bytes[at] = byte;
        }
        if let Ok(text) = std::str::from_utf8(&bytes)
            && let Ok(stored) = Stored::from_toml(text, &identity())
        {
            prop_assert!(!cut);
            prop_assert!(stored.rows.iter().all(Row::is_sensible));
        }
    }
}
