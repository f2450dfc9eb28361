#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| maru_fuzz::sysfs(data));
