//! Keys of processes are found in each of their keyrings. Needs root.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use holdfast_bpf::keyrings::{KeyDetector, Keyring};

/// Python program that joins a new session keyring, adds a key of this type and name to one of its keyrings, prints a
/// line, and waits.
const PROGRAM: &str = r#"
import ctypes, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
kind, name, keyring = sys.argv[1].encode(), sys.argv[2].encode(), int(sys.argv[3])
def add():
    content = None if kind == b'keyring' else b'content'
    key = libc.syscall(248, kind, name, content, len(content or b''), keyring) if keyring else 1
    print('added' if key > 0 else 'lacks', flush=True)
    time.sleep(600)
if libc.syscall(250, 1, None) < 0: print('lacks', flush=True)
if keyring == -1: threading.Thread(target=add, daemon=True).start(); time.sleep(600)
else: add()
"#;

struct ChildGuard(Child);

impl Drop for ChildGuard {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn keys_are_found_in_each_keyring() {
    let keyrings = KeyDetector::load().expect("load");
    // Type and name of the key; its keyring (-1 thread, -2 process, -3 session, 0 for no key); the expected result.
    for (kind, name, keyring, expected) in [
        ("user", "one", "-1", Some(Keyring::ThreadOrProcess)),
        ("user", "one", "-2", Some(Keyring::ThreadOrProcess)),
        ("user", "one", "-3", Some(Keyring::Session)),
        ("user", "invocation_ids", "-3", Some(Keyring::Session)),
        ("user", "invocation_id", "-3", None),
        ("keyring", "one", "-3", None),
        ("user", "one", "0", None),
    ] {
        let mut command = Command::new("python3");
        command.args(["-c", PROGRAM, kind, name, keyring]);
        let mut child = ChildGuard(command.stdout(Stdio::piped()).spawn().expect("python3"));
        let mut line = String::new();
        let output = child.0.stdout.take().expect("a pipe");
        BufReader::new(output).read_line(&mut line).expect("read");
        if line.trim() != "added" {
            eprintln!("this kernel gives no keys");
            return;
        }
        let found = keyrings
            .keyring_with_keys(child.0.id() as i32)
            .expect("told");
        assert_eq!(found, expected, "{kind} {name} in {keyring}");
    }
    assert_eq!(keyrings.keyring_with_keys(i32::MAX).expect("told"), None);
}
