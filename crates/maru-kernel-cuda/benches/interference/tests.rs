//! The parts of the bench `interference` that need no device: its statistics, its command line, its search.
#![allow(dead_code, reason = "the bench uses the rest")]

mod find;
mod grid;
mod options;
mod stats;

mod find_tests {
    use std::path::Path;

    use crate::find::{candidates, companion};

    fn found(given: Option<&str>, files: &[&str]) -> Vec<String> {
        let is_file = |path: &Path| files.iter().any(|file| Path::new(file) == path);
        let paths = candidates(given.map(Path::new), is_file);
        paths.iter().map(|p| p.display().to_string()).collect()
    }

    #[test]
    fn without_a_path_the_loader_searches() {
        assert_eq!(found(None, &[]), ["libcublas.so.13", "libcublas.so.12", "libcublas.so"]);
    }

    #[test]
    fn a_file_is_taken_whatever_its_name() {
        assert_eq!(found(Some("/opt/my.so"), &["/opt/my.so"]), ["/opt/my.so"]);
    }

    #[test]
    fn a_folder_of_wheels_a_toolkit_or_the_librarys_own() {
        let wheels = ["/p/nvidia/cublas/lib/libcublas.so.12", "/p/nvidia/cu13/lib/libcublas.so.13"];
        assert_eq!(found(Some("/p"), &wheels), [wheels[1], wheels[0]]);
        let toolkit = "/usr/local/cuda/lib64/libcublas.so";
        assert_eq!(found(Some("/usr/local/cuda"), &[toolkit]), [toolkit]);
        assert_eq!(found(Some("/p/nvidia/cu13/lib"), &wheels), [wheels[1]]);
    }

    #[test]
    fn a_path_that_leads_nowhere_finds_nothing() {
        assert!(found(Some("/nowhere"), &["/p/libcublas.so"]).is_empty());
    }

    #[test]
    fn the_companion_lies_beside_it_with_the_same_version() {
        assert_eq!(companion(Path::new("/x/libcublas.so.12")).unwrap(), Path::new("/x/libcublasLt.so.12"));
        assert_eq!(companion(Path::new("libcublas.so")).unwrap(), Path::new("libcublasLt.so"));
        assert_eq!(companion(Path::new("/x/other.so")), None);
    }
}

mod grid_tests {
    use crate::grid::{MoverKind, chosen};

    fn names(only: &[&str]) -> Vec<String> {
        let only: Vec<String> = only.iter().map(|w| (*w).to_owned()).collect();
        chosen(&only).iter().map(MoverKind::to_string).collect()
    }

    #[test]
    fn the_whole_grid_has_every_ring_and_starts_with_the_flat_copy() {
        let all = names(&[]);
        assert_eq!(all.len(), 1 + 5 + 27 + 1);
        assert_eq!(all[0], "flat copy");
        let mut unique = all.clone();
        unique.sort();
        unique.dedup();
        assert_eq!(unique.len(), all.len(), "names are told apart");
    }

    #[test]
    fn words_choose_movers_and_never_drop_the_flat_copy() {
        assert_eq!(names(&["direct 2"]), ["flat copy", "direct 2"]);
        assert_eq!(
            names(&["32M/2", "fallback"]),
            ["flat copy", "staged 32M/2 half", "staged 32M/2 b32", "staged 32M/2 b132", "fallback"]
        );
        assert_eq!(names(&["no such mover"]), ["flat copy"]);
    }
}

mod options_tests {
    use crate::grid::LoadKind;
    use crate::options::Options;

    fn parse(line: &str) -> Result<Options, String> {
        Options::parse(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn nothing_given_is_the_whole_grid() {
        assert_eq!(parse("--bench").unwrap(), Options::default());
    }

    #[test]
    fn everything_can_be_given() {
        let found = parse(
            "--load decode,none --direction D2H --only 64M/2,direct --only fallback --layout mla --seconds 0.3 \
             --bytes 64M --in-flight 2 --one-stream --no-graph --cublas /x --csv a.csv --list",
        );
        let expected = Options {
            loads: vec![LoadKind::Decode, LoadKind::None],
            directions: vec![1],
            only: ["64M/2", "direct", "fallback"].map(str::to_owned).to_vec(),
            layout: "mla".into(),
            seconds: 0.3,
            bytes: 64_000_000,
            in_flight: 2,
            one_stream: true,
            graph: false,
            cublas: Some("/x".into()),
            csv: Some("a.csv".into()),
            list: true,
        };
        assert_eq!(found.unwrap(), expected);
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (line, part) in [
            ("--load matmul", "matmul"),
            ("--load ,", "no load"),
            ("--direction both", "h2d or d2h"),
            ("--seconds 0", "0.01"),
            ("--seconds nan", "0.01"),
            ("--bytes 12K", "12K"),
            ("--bytes 99999999999999999999G", "16G"),
            ("--bytes M", "16G"),
            ("--in-flight 0", "between 1 and 16"),
            ("--csv", "needs a value"),
            ("--fast", "--fast"),
        ] {
            let error = parse(line).unwrap_err();
            assert!(error.contains(part), "{line}: {error}");
        }
    }
}

mod stats_tests {
    use crate::stats::{Moved, Pace, Slowdown, Track, is_doubtful, quantile, reaches};

    fn close(found: f64, expected: f64) {
        assert!((found - expected).abs() < 1e-9, "{found} instead of {expected}");
    }

    fn track(start: f64, times: &[f64]) -> Track {
        let mut at = start;
        let ends = times.iter().map(|t| {
            at += t;
            at
        });
        Track { start, ends: ends.collect(), starved: 0 }
    }

    #[test]
    fn pace_leaves_out_the_warm_up() {
        let pace = track(5.0, &[9.0, 9.0, 2.0, 2.0, 2.0, 6.0]).pace(18.0).unwrap();
        assert_eq!((pace.chunks, pace.window), (4, (23.0, 35.0)));
        close(pace.mean, 3.0);
        close(pace.median, 2.0);
        close(pace.p99, 6.0);
    }

    #[test]
    fn too_few_chunks_are_no_measurement() {
        assert_eq!(track(0.0, &[1.0, 1.0]).pace(0.0), None);
        assert_eq!(track(0.0, &[1.0; 10]).pace(100.0), None);
        assert_eq!(Track::default().pace(0.0), None);
        assert!(track(0.0, &[1.0; 3]).pace(0.0).is_some());
    }

    #[test]
    fn quantiles_are_nearest_ranks() {
        let values: Vec<f64> = (1..=100).map(f64::from).collect();
        close(quantile(&values, 0.5), 50.0);
        close(quantile(&values, 0.99), 99.0);
        close(quantile(&values, 1.0), 100.0);
        close(quantile(&values, 0.0), 1.0);
        close(quantile(&[7.0], 0.99), 7.0);
        close(quantile(&[], 0.5), 0.0);
    }

    #[test]
    fn a_window_cuts_batches_in_proportion() {
        // 10 MB every 10 ms: 1 GB/s.
        let even = Moved { ends: vec![10.0, 20.0, 30.0, 40.0, 50.0], batch_bytes: 1e7, starved: 0 };
        close(even.rate((13.0, 47.0)), 1.0);
        close(even.rate((10.0, 50.0)), 1.0);
        close(even.rate(even.window()), 1.0);
        // Twice as slow in the second half.
        let uneven = Moved { ends: vec![0.0, 10.0, 20.0, 40.0], ..even };
        close(uneven.rate((10.0, 30.0)), 0.75);
        close(uneven.rate((5.0, 5.0)), 0.0);
    }

    #[test]
    fn nothing_is_counted_outside_of_the_batches() {
        let moved = Moved { ends: vec![10.0, 20.0, 30.0], batch_bytes: 1e6, starved: 0 };
        close(moved.rate((0.0, 40.0)), 2e6 / 40.0 / 1e6);
        close(moved.rate((31.0, 40.0)), 0.0);
        close(Moved::default().rate((0.0, 1.0)), 0.0);
        assert_eq!(Moved::default().window(), (0.0, 0.0));
    }

    #[test]
    fn slowdown_is_over_the_mean_of_both_baselines() {
        let pace =
            |mean: f64| Pace { mean, median: mean / 2.0, p99: mean * 3.0, chunks: 9, window: (0.0, 1.0) };
        let slowdown = Slowdown::of(&pace(3.0), &pace(1.0), &pace(2.0));
        close(slowdown.mean, 2.0);
        close(slowdown.median, 2.0);
        close(slowdown.p99, 9.0 / 0.75);
        close(slowdown.drift, 2.0);
    }

    #[test]
    fn good_enough_is_near_the_flat_copy_in_both_respects() {
        assert!(reaches(1.04, 1.01, 0.90));
        assert!(!reaches(1.041, 1.01, 0.95), "too slow");
        assert!(!reaches(1.01, 1.01, 0.89), "moves too little");
    }

    #[test]
    fn a_host_that_does_not_keep_up_is_told_of() {
        assert!(!is_doubtful(0, 0));
        assert!(!is_doubtful(8, 400));
        assert!(is_doubtful(9, 400));
    }
}
