//! Processes in a Landlock domain are detected, whatever the domain restricts. Needs root.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use holdfast_bpf::landlock::LandlockDomains;

/// Python program that enters a domain in its first thread or in another one, prints a line, and waits.
const PROGRAM: &str = r#"
import ctypes, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
files, network, scopes, thread = (int(word) for word in sys.argv[1:])
def enter():
    attribute = struct.pack('QQQ', files, network, scopes)
    while attribute.endswith(bytes(8)): attribute = attribute[:-8]
    ruleset = libc.syscall(444, attribute, ctypes.c_size_t(len(attribute)), 0)
    libc.prctl(38, 1, 0, 0, 0)
    entered = ruleset >= 0 and libc.syscall(446, ruleset, 0) == 0
    print('in' if entered else 'lacks', flush=True)
    time.sleep(600)
if files + network + scopes == 0: print('out', flush=True); time.sleep(600)
elif thread: threading.Thread(target=enter, daemon=True).start(); time.sleep(600)
else: enter()
"#;

struct ChildGuard(Child);

impl Drop for ChildGuard {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a process with these restrictions, and returns it with its line.
fn start_process(restrictions: [u32; 4]) -> (ChildGuard, String) {
    let mut command = Command::new("python3");
    command.args(["-c", PROGRAM]);
    command.args(restrictions.map(|word| word.to_string()));
    let mut child = command.stdout(Stdio::piped()).spawn().expect("python3");
    let mut line = String::new();
    let output = child.stdout.take().expect("a pipe");
    BufReader::new(output).read_line(&mut line).expect("read");
    (ChildGuard(child), line.trim().to_owned())
}

#[test]
fn domain_of_any_kind_is_detected() {
    let domains = LandlockDomains::load().expect("load");
    // Restrictions of files, network and scopes, and 1 if only a second thread is restricted.
    for words in [
        [1, 0, 0, 0],
        [1, 0, 0, 1],
        [0, 1, 0, 0],
        [0, 0, 1, 0],
        [0; 4],
    ] {
        let (child, line) = start_process(words);
        if line == "lacks" {
            eprintln!("{words:?}: this kernel has no such restriction");
            continue;
        }
        let pid = child.0.id() as i32;
        let is_confined = domains.is_confined(pid).expect("told");
        assert_eq!(is_confined, line == "in", "{words:?}");
    }
    let own = std::process::id() as i32;
    assert!(
        !domains.is_confined(own).expect("told"),
        "the thread that looked has ended"
    );
    assert!(
        !domains.is_confined(i32::MAX).expect("told"),
        "no such process"
    );
}
