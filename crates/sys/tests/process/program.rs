//! A small C program under test.

use crate::moving::{Host, Tree};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// How long anything may take on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);

/// A program that runs.
pub struct Program {
    folder: PathBuf,
    child: Child,
}

impl Program {
    /// Compiles and starts it, and waits until it says that it is ready.
    pub fn start(source: &str) -> Self {
        let program = compile(source);
        let folder = scratch(source);
        let child = Command::new(program)
            .arg(&folder)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("starts");
        let program = Self { folder, child };
        program.wait_for(|program| program.read("ready").is_some());
        program
    }

    /// Where it is now: a child of the test.
    pub fn tree(&self, host: &Host) -> Tree {
        Tree::original(self.child.id() as i32, host)
    }

    /// Waits until it has checked itself a few more times.
    pub fn goes_on(&self) {
        let beats = |program: &Self| {
            program
                .read("beats")
                .and_then(|text| text.parse::<u64>().ok())
                .unwrap_or(0)
        };
        let before = beats(self);
        self.wait_for(|program| beats(program) >= before + 5);
    }

    /// Tells it to end, and asks for its verdict.
    pub fn ends_well(mut self, tree: Tree) {
        std::fs::write(self.folder.join("end"), "").expect("writes");
        let status = tree.wait(&mut self.child, LIMIT);
        let verdict = self
            .read("verdict")
            .unwrap_or_else(|| "no verdict".to_owned());
        assert_eq!((verdict.as_str(), status), ("passed", 0));
    }

    fn wait_for(&self, condition: impl Fn(&Self) -> bool) {
        let began = Instant::now();
        while !condition(self) {
            if let Some(verdict) = self.read("verdict") {
                panic!("the program says: {verdict}");
            }
            assert!(began.elapsed() < LIMIT, "the program does not go on");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn read(&self, name: &str) -> Option<String> {
        std::fs::read_to_string(self.folder.join(name)).ok()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{:?} says: {:?}", self.folder, self.read("verdict"));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// Compiled once for a run of tests.
fn compile(source: &str) -> PathBuf {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _guard = ONE_AT_A_TIME.lock();
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/process/programs");
    let program =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{source}-{}", std::process::id()));
    if !program.exists() {
        let status = Command::new("gcc")
            .args([
                "-O1",
                "-g",
                "-Wall",
                "-Wno-unused-function",
                "-pthread",
                "-o",
            ])
            .arg(&program)
            .arg(sources.join(source).with_extension("c"))
            .arg("-lrt")
            .status()
            .expect("gcc");
        assert!(status.success(), "{source}.c does not compile");
    }
    program
}

/// Programs without privileges must reach it.
fn scratch(name: &str) -> PathBuf {
    static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let number = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let name = format!("holdfast-{name}-{}-{number}", std::process::id());
    let folder = std::env::temp_dir().join(name);
    std::fs::create_dir_all(&folder).expect("a folder");
    folder
}
