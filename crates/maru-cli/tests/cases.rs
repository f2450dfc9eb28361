//! Faults that others met, as a user of the command line meets them: exit code, kind, words, nothing left behind.
//! `docs/faults.md` has the cases.

mod common;

use std::os::unix::fs::symlink;

use common::{Place, Run, Sim, end, leftovers, maru, start, until};
use serde_json::{Value, json};

fn layout(arguments: &str) -> Run {
    let words: Vec<&str> = ["layout", "--json"].into_iter().chain(arguments.split(' ')).collect();
    maru(&words)
}

/// Some keys of an accepted layout.
fn reads(arguments: &str, expected: Value) {
    let run = layout(arguments);
    let found = run.json();
    assert_eq!(run.code, Some(0), "{arguments}: {run:?}");
    for (key, value) in expected.as_object().expect("keys") {
        assert_eq!(&found[key], value, "{arguments}: {key} of {found}");
    }
}

/// A refused layout: bad input, and words that name what is wrong.
fn refused(arguments: &str, kind: &str, words: &[&str]) {
    let (found, message) = layout(arguments).error(2);
    assert_eq!(found, kind, "{arguments}: {message}");
    for word in words {
        assert!(message.contains(word), "{arguments}: no {word:?} in {message}");
    }
}

/// A run that must fail so, and leave no pool of its own.
fn fails(run: &Run, code: i32, kind: &str, words: &[&str]) {
    let (found, message) = run.error(code);
    assert_eq!(found, kind, "{message}");
    for word in words {
        assert!(message.contains(word), "no {word:?} in {message}");
    }
    assert!(leftovers(run.pid).is_empty(), "{:?}", leftovers(run.pid));
}

#[test]
fn c01_the_planes_are_where_they_are_told_to_be() {
    refused(
        "--shape 2,2,16,8,128 --stride 32768,16384,1024,128,1 --num-blocks 2 --block-size 16",
        "ambiguous_layout",
        &["kv,block,token,head,dim", "block,kv,token,head,dim", "axes="],
    );
    let told = "--shape 2,2,16,8,128 --block-size 16 --axes";
    reads(
        &format!("{told} kv,block,token,head,dim"),
        json!({"byte_strides": {"kv": 65536, "block": 32768, "token": 2048, "head": 256}}),
    );
    reads(
        &format!("{told} block,kv,token,head,dim"),
        json!({"byte_strides": {"kv": 32768, "block": 65536, "token": 2048, "head": 256}}),
    );
    reads(
        "--shape 6,2,16,2,128 --block-size 16",
        json!({"axes": ["block", "kv", "token", "head", "dim"], "num_blocks": 6, "block_size": 16, "num_heads": 2}),
    );
}

#[test]
fn c02_a_view_into_a_shared_allocation_keeps_its_step() {
    reads(
        "--shape 4,2,16,2,64 --stride 12288,2048,128,64,1 --block-size 16",
        json!({"num_blocks": 4, "byte_strides": {"kv": 4096, "block": 24576, "token": 256, "head": 128}}),
    );
    for stride in ["0,2048,128,64,1", "-12288,2048,128,64,1", "2048,2048,128,64,1", "64,2048,128,64,1"] {
        let arguments = format!("--shape 4,2,16,2,64 --stride {stride} --block-size 16");
        let (_, message) = layout(&arguments).error(2);
        assert!(message.contains("stride") || message.contains("share memory"), "{arguments}: {message}");
    }
}

#[test]
fn c03_one_head_is_one_head_in_every_form() {
    let expected =
        json!({"num_heads": 1, "block_size": 128, "head_size": 128, "num_blocks": 8, "kv_planes": 2});
    for form in ["8,2,1,128,128", "8,2,128,1,128"] {
        reads(&format!("--shape {form} --block-size 128 --kv-heads 1"), expected.clone());
    }
    for stride in ["1", "16384", "999999", "0", "-1", "9223372036854775807"] {
        for (form, strides) in [
            ("8,2,1,128,128", format!("32768,16384,{stride},128,1")),
            ("8,2,128,1,128", format!("32768,16384,128,{stride},1")),
        ] {
            reads(
                &format!("--shape {form} --stride {strides} --block-size 128 --kv-heads 1"),
                expected.clone(),
            );
        }
    }
    for form in ["8,1,128,256", "8,128,1,256"] {
        reads(&format!("--shape {form} --block-size 128 --kv-heads 1 --head-size 128"), expected.clone());
    }
    reads(
        "--shape 8,2,16,128,128 --block-size 16 --kv-heads 128",
        json!({"num_heads": 128, "block_size": 16, "native": true}),
    );
}

#[test]
fn c08_the_stated_block_size_names_the_token_axis() {
    reads(
        "--shape 4,2,4,16,64 --stride 147456,4096,64,256,1 --block-size 16",
        json!({"block_size": 16, "num_heads": 4, "num_slots": 64, "byte_strides": {"kv": 8192, "block": 294912, "token": 512, "head": 128}}),
    );
}

#[test]
fn c09_latent_rows_have_one_plane() {
    for (shape, blocks, tokens) in [("512,64,576", 512, 64), ("2,64,576", 2, 64), ("512,2,576", 512, 2)] {
        reads(
            &format!("--shape {shape} --mla"),
            json!({"kv_planes": 1, "num_blocks": blocks, "block_size": tokens, "row_bytes": 1152}),
        );
    }
    refused(
        "--shape 64,2,16,8,128 --axes kv,block,token,head,dim",
        "layout_mismatch",
        &["kv,block,token,head,dim", "64", "K and V make 2"],
    );
    refused("--shape 64,2,16,8,128 --mla --axes block,kv,token,head,dim", "layout_mismatch", &["kv"]);
}

#[test]
fn c11_keys_that_are_not_ours_stop_every_command() {
    let place = Place::new();
    let pool = place.path("pool");
    for (text, key) in [
        ("[cxl]\nprefalt = true\n".to_owned(), "cxl.prefalt"),
        (format!("[transfer]\npath = '{pool}'\n"), "transfer.path"),
        ("chunk_sise = 256\n".to_owned(), "chunk_sise"),
        ("[[cxl.pool]]\nsize = '1MiB'\n".to_owned(), "cxl.pool[0].path"),
        (format!("[[cxl.pool]]\npath = '{pool}'\nsise = '1MiB'\n"), "sise"),
        (
            format!("[[cxl.pool]]\npath = '{pool}'\nsize = '1MiB'\n[transfer]\nbackend = 'Native'\n"),
            "backend",
        ),
    ] {
        let file = place.file("maru.toml", &text);
        fails(&maru(&["config", "check", &file, "--json"]), 2, "config", &[key, "maru.toml:"]);
        fails(&place.run(&["--config", &file, "--json"]), 2, "config", &[key, "maru.toml:"]);
        fails(
            &maru(&["doctor", "--no-probe", "--config", &file, "--json"]),
            2,
            "config",
            &[key, "maru.toml:"],
        );
        assert!(!std::path::Path::new(&pool).exists(), "{text}");
    }
}

#[test]
fn c12_odd_rows_are_moved_in_words_that_fit() {
    reads(
        "--shape 2,4,16,1,46 --axes kv,block,token,head,dim --block-size 16",
        json!({"head_size": 46, "slab_token_bytes": 184, "access_bytes": 4, "native": true}),
    );
    for (offset, access) in [("0", 16), ("2", 2), ("8", 8), ("1", 1), ("24", 8)] {
        reads(
            &format!("--shape 6,2,16,2,64 --block-size 16 --base-offset {offset}"),
            json!({"access_bytes": access}),
        );
    }
}

/// A pool that exists, with something of somebody else's in it.
fn file_of(place: &Place, name: &str, bytes: usize) -> String {
    let path = place.path(name);
    std::fs::write(&path, vec![0x5a; bytes]).expect("write");
    path
}

#[test]
fn c14_windows_off_the_device_are_refused_before_a_byte_is_written() {
    let place = Place::new();
    let pool = file_of(&place, "pool", 1 << 20);
    let max = i64::MAX;
    for (window, kind, words) in [
        ("offset=512\nsize='64KiB'".to_owned(), "invalid_argument", ["offset 512", "alignment 4096"]),
        ("offset=4097\nsize='64KiB'".to_owned(), "invalid_argument", ["offset 4097", "alignment 4096"]),
        ("offset='1020KiB'\nsize='8KiB'".to_owned(), "invalid_argument", ["offset 1044480", "1048576"]),
        ("offset=0\nsize='2MiB'".to_owned(), "invalid_argument", ["length 2097152", "1048576"]),
        ("offset='1MiB'\nsize='64KiB'".to_owned(), "invalid_argument", ["offset 1048576", "1048576"]),
        ("offset='1MiB'\nsize=0".to_owned(), "invalid_argument", ["offset 1048576", "1048576"]),
        (format!("offset={}\nsize='64KiB'", max - 4095), "config", ["cxl.pool[0].size", "2^63"]),
        (format!("offset=0\nsize={max}"), "invalid_argument", ["length 9223372036854775807", "1048576"]),
        (
            "offset=18446744073707454464\nsize='64KiB'".to_owned(),
            "config",
            ["cxl.pool[0].offset", "maru.toml:3"],
        ),
        ("offset=-4096\nsize='64KiB'".to_owned(), "config", ["cxl.pool[0].offset", "-4096"]),
        ("offset=0\nsize=4095".to_owned(), "config", ["cxl.pool[0].size", "4095"]),
    ] {
        let file = place.file("maru.toml", &format!("[[cxl.pool]]\npath='{pool}'\n{window}\n"));
        for role in ["both", "producer"] {
            fails(&place.run(&["--role", role, "--config", &file, "--force", "--json"]), 2, kind, &words);
        }
        assert_eq!(std::fs::read(&pool).expect("read"), vec![0x5a; 1 << 20], "{window}");
    }
}

#[test]
fn c14_pools_that_share_bytes_are_refused() {
    let place = Place::new();
    let pool = file_of(&place, "pool", 64 << 10);
    let again = place.dir.path().join("./pool").to_str().expect("UTF-8").to_owned();
    for (other, windows) in [
        (&pool, "offset='4MiB'\nsize='8MiB'"),
        (&again, "offset='4MiB'\nsize='8MiB'"),
        (&pool, "offset=0\nsize=0"),
        (&pool, "offset='8188KiB'\nsize='4KiB'"),
    ] {
        let text =
            format!("[[cxl.pool]]\npath='{pool}'\nsize='8MiB'\n[[cxl.pool]]\npath='{other}'\n{windows}\n");
        let file = place.file("maru.toml", &text);
        let words = ["cxl.pool[0]", "cxl.pool[1]", "overlap", "maru.toml:4"];
        fails(&maru(&["config", "check", &file, "--json"]), 2, "config", &words);
        fails(&place.run(&["--config", &file, "--json"]), 2, "config", &words);
    }
    // Neighbours share nothing.
    let text = format!(
        "[[cxl.pool]]\npath='{pool}'\nsize='8MiB'\n[[cxl.pool]]\npath='{pool}'\noffset='8MiB'\nsize='8MiB'\n"
    );
    assert_eq!(maru(&["config", "check", &place.file("maru.toml", &text)]).code, Some(0));
}

#[test]
fn c14_two_processes_do_not_carve_the_same_bytes() {
    let place = Place::new();
    let pool = file_of(&place, "pool", 4 << 20);
    let window = |offset: u64| {
        let text = format!("[[cxl.pool]]\npath='{pool}'\noffset={offset}\nsize='1MiB'\n");
        place.file(&format!("{offset}.toml"), &text)
    };
    let (first, second, apart) = (window(0), window(512 << 10), window(2 << 20));
    let slow = ["--role", "producer", "--config", &first, "--tokens", "2000", "--force"];
    let run = start(place.p2p(&slow).args(["--test-pause", "200", "--json"]));
    // Its header is there, so it has the lock.
    until("the pool is made", || std::fs::read(&pool).ok().filter(|bytes| bytes[0] != 0x5a));
    let other = ["--role", "producer", "--tokens", "300", "--force", "--json", "--config"];
    fails(&place.run(&[&other[..], &[&second]].concat()), 1, "busy", &[&pool]);
    assert_eq!(place.run(&[&other[..], &[&apart]].concat()).code, Some(0), "windows that do not meet");
    assert_eq!(end(run).code, Some(0));
    let consumer = place.run(&["--role", "consumer", "--config", &first, "--tokens", "2000", "--json"]);
    assert_eq!((consumer.code, &consumer.json()["verified"]), (Some(0), &json!(true)), "{consumer:?}");
}

#[test]
fn c16_sizes_beyond_63_bits_are_errors() {
    for shape in [
        "1099511627776,2,16,8,1048576",
        "9223372036854775807,2,16,8,128",
        "4611686018427387904,2,16,8,128",
        "18446744073709551616,2,16,8,128",
        "-9223372036854775808,2,16,8,128",
    ] {
        let (kind, message) = layout(&format!("--shape {shape} --block-size 16")).error(2);
        assert_eq!(kind, "invalid_argument", "{message}");
        assert!(!message.contains("panicked"), "{message}");
    }
    reads(
        "--shape 65537,2,16,8,128 --dtype u8 --block-size 16",
        json!({"num_slots": 65_537 * 16, "byte_strides": {"kv": 16384, "block": 32768, "token": 1024, "head": 128}}),
    );
}

#[test]
fn c20_memory_that_the_driver_refuses_goes_through_the_fallback_or_says_so() {
    let Some(sim) = Sim::new() else { return };
    let place = Place::new();
    let profile = place.path("small.toml");
    let p2p = |more: &[&str]| {
        let arguments =
            [&["p2p", "--profile", &profile, "--device", "cuda:0", "--tokens", "300", "--json"], more]
                .concat();
        sim.maru(&arguments, "devices=1;fail_all=cuMemHostRegister:1:1")
    };
    let run = p2p(&[]);
    assert_eq!(run.code, Some(0), "{run:?}");
    let report = run.json();
    assert_eq!((&report["verified"], &report["backend"]), (&json!(true), &json!("fallback")), "{run:?}");
    assert!(run.err.contains("CUDA_ERROR_INVALID_VALUE"), "the reason is logged: {}", run.err);
    assert!(leftovers(run.pid).is_empty());
    fails(&p2p(&["--backend", "native"]), 2, "not_available", &["not registered"]);
    let strict = place.file("maru.toml", "[cxl]\nrequire_registration = true\n");
    fails(&p2p(&["--config", &strict]), 1, "registration", &["CUDA_ERROR_INVALID_VALUE", "code 1", "tmpfs"]);
}

#[test]
fn c21_long_prompts_and_none() {
    let place = Place::new();
    let run = place.run(&["--tokens", "70000", "--json"]);
    assert_eq!((run.code, &run.json()["verified"]), (Some(0), &json!(true)), "{run:?}");
    assert!(leftovers(run.pid).is_empty());
    for tokens in ["0", "-1", "16777217", "18446744073709551616", "1e3", "0x10", ""] {
        let run = place.run(&["--tokens", tokens, "--json"]);
        fails(&run, 2, "invalid_argument", &["tokens"]);
    }
}

#[test]
fn c22_what_is_no_device_is_called_by_its_name() {
    let place = Place::new();
    let dir = place.dir.path();
    std::fs::create_dir(dir.join("folder")).expect("a directory");
    let _socket = std::os::unix::net::UnixListener::bind(dir.join("socket")).expect("a socket");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        dir.join("pipe"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
        0,
    )
    .expect("a pipe");
    symlink("around", dir.join("around")).expect("a link");
    symlink("gone", dir.join("dangling")).expect("a link");
    file_of(&place, "empty", 0);
    file_of(&place, "short", 100);
    for (path, kind, word) in [
        (place.path("folder"), "invalid_argument", "directory"),
        (place.path("socket"), "invalid_argument", "socket"),
        (place.path("pipe"), "invalid_argument", "pipe"),
        (place.path("around"), "invalid_argument", "symbolic link"),
        ("/dev/null".to_owned(), "invalid_argument", "not on the dax bus"),
        ("/dev/zero".to_owned(), "invalid_argument", "not on the dax bus"),
        ("/proc/self/mem".to_owned(), "bad_device", "file size is \"0\""),
        (place.path("empty"), "bad_device", "file size is \"0\""),
        (place.path("short"), "bad_device", "file size is \"100\""),
        (place.path("nowhere/pool"), "not_found", "no such file"),
        (place.path("short/pool"), "io", "Not a directory"),
    ] {
        for role in ["both", "producer"] {
            let run = place.run(&["--role", role, "--pool", &path, "--json"]);
            let (found, message) = run.error(if kind == "io" { 1 } else { 2 });
            assert_eq!(found, kind, "{role} {path}: {message}");
            assert!(message.contains(word) && message.contains(&path), "{role} {path}: {message}");
            assert!(!message.contains("18446744073709551615"), "{message}");
            assert!(leftovers(run.pid).is_empty());
        }
        // A consumer may be there before the pool is; what can never become one it refuses at once.
        let run = place.run(&["--role", "consumer", "--pool", &path, "--timeout", "1", "--json"]);
        let (found, message) = run.error(if kind == "invalid_argument" { 2 } else { 1 });
        assert!(found == kind || found == "timeout", "{path}: {found}: {message}");
        assert!(message.contains(word) && message.contains(&path), "{path}: {message}");
    }
    // A short file is as it was, and nothing was made behind the dangling link or beside it.
    assert_eq!(std::fs::read(place.path("short")).expect("read"), vec![0x5a; 100]);
    assert!(!dir.join("nowhere").exists());
}

#[test]
fn a_file_that_is_no_whole_number_of_pages_is_not_written_behind_its_last_whole_page() {
    let place = Place::new();
    let pool = file_of(&place, "pool", (1 << 20) + 1000);
    let run = place.run(&["--pool", &pool, "--force", "--json"]);
    assert_eq!((run.code, &run.json()["verified"]), (Some(0), &json!(true)), "{run:?}");
    let bytes = std::fs::read(&pool).expect("read");
    assert_eq!(bytes.len(), (1 << 20) + 1000);
    assert!(bytes[1 << 20..].iter().all(|b| *b == 0x5a));
}
