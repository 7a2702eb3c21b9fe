//! Tests of `holdfast pool connect` with failing elements. The elements are threads of the test.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, ChildStdin, ChildStdout, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::spawn;

use holdfast_api::pool::{Element, ElementEvent, Registration, Service};
use holdfast_bench::cluster::find_program;
use holdfast_bench::pools::words;

use super::{Host, PATIENCE};

/// Time limit for an answer in seconds, equal to [`PATIENCE`].
pub const LONG: &str = "120";

/// Brings up a host with registrar and pool daemon; the path is the daemon's socket for programs.
pub fn scene(name: &str) -> Option<(Host, PathBuf)> {
    let mut host = Host::up(name)?;
    let daemon = find_program("holdfastd").expect("holdfastd");
    host.lab
        .run("n1", "pool", &daemon, &words(["--role", "pool"]))
        .expect("a pool daemon");
    let socket = host.lab.run_file("n1", "pool-app.sock").expect("a path");
    host.until("a pool daemon", || socket.exists().then_some(()));
    Some((host, socket))
}

/// A session of `holdfast pool connect` with input from the test.
pub struct Session {
    child: Child,
    pub input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    notes: BufReader<ChildStderr>,
}

impl Session {
    pub fn start(host: &Host, handle: &str, linger: &str) -> Session {
        let mut child = host
            .command(&["pool", "connect", handle, "--linger", linger])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("a command that runs");
        Session {
            input: child.stdin.take(),
            output: BufReader::new(child.stdout.take().expect("its output")),
            notes: BufReader::new(child.stderr.take().expect("its notes")),
            child,
        }
    }

    pub fn write(&mut self, text: &str) {
        let input = self.input.as_mut().expect("an open input");
        input.write_all(text.as_bytes()).expect("written");
    }

    /// Closes the input, and waits until the command has seen its end: the thread that reads the input has ended then.
    pub fn finish(&mut self, host: &Host) {
        // The session has an element, so both threads of the command run.
        self.noted(": element ");
        self.input = None;
        let tasks = format!("/proc/{}/task", self.child.id());
        host.until("the input's end", || {
            let tasks = std::fs::read_dir(&tasks).expect("a process");
            (tasks.count() <= 2).then_some(())
        });
    }

    pub fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("a line");
        line
    }

    /// Waits for a note with this text.
    pub fn noted(&mut self, what: &str) {
        let mut note = String::new();
        while !note.contains(what) {
            note.clear();
            let length = self.notes.read_line(&mut note).expect("a note");
            assert_ne!(length, 0, "no note says: {what}");
        }
    }

    /// Returns the rest of the output and of the notes, and true if the command succeeded.
    pub fn end(mut self) -> (String, String, bool) {
        let (mut rest, mut notes) = (String::new(), String::new());
        self.output.read_to_string(&mut rest).expect("its output");
        self.notes.read_to_string(&mut notes).expect("its notes");
        let status = self.child.wait().expect("its end");
        (rest, notes, status.success())
    }
}

/// Messages from elements to the test.
struct Told(Receiver<&'static str>);

impl Told {
    fn wait(&self, wanted: &str) {
        let told = self.0.recv_timeout(PATIENCE).expect("an element's word");
        assert_eq!(told, wanted);
    }
}

/// Two elements that number lines. The first element that has received `asked` lines answers `answers` of them, and
/// dies when told to; the other element answers all lines and ends the session.
#[derive(Clone)]
struct Numbers {
    asked: u64,
    answers: u64,
    tell: Sender<&'static str>,
    dies: Arc<Mutex<Option<Receiver<()>>>>,
}

impl Numbers {
    fn start(socket: &Path, asked: u64, answers: u64) -> (Told, Sender<()>) {
        let (tell, told) = channel();
        let (die, dies) = channel();
        let dies = Arc::new(Mutex::new(Some(dies)));
        let numbers = Numbers {
            asked,
            answers,
            tell,
            dies,
        };
        for _ in 0..2 {
            let addresses = Vec::new();
            let service = Service::Sessions { addresses, port: 0 };
            let element = Element::register(socket, Registration::new("numbers", service));
            let (element, own) = (element.expect("a channel"), numbers.clone());
            spawn(move || own.serve(&element));
        }
        let told = Told(told);
        told.wait("registered");
        told.wait("registered");
        (told, die)
    }

    fn serve(&self, element: &Element) {
        let (mut count, mut came) = (0_u64, 0);
        while let Ok(Some(event)) = element.next() {
            match event {
                ElementEvent::Registered { .. } => self.tell.send("registered").expect("a test"),
                ElementEvent::Resumed { state, .. } => {
                    count = u64::from_be_bytes(state.try_into().expect("a state"));
                }
                ElementEvent::Data { session, bytes } => {
                    came += 1;
                    let mut dies = self.dies.lock().expect("a lock");
                    if dies.is_none() || came <= self.answers {
                        count += 1;
                        let answer = [format!("{count} ").as_bytes(), &bytes].concat();
                        element.keep(session, &count.to_be_bytes()).expect("kept");
                        element.send(session, &answer).expect("sent");
                    }
                    if dies.is_some() && came == self.asked {
                        self.tell.send("asked").expect("a test");
                        let end = dies.take().expect("not told yet");
                        end.recv_timeout(PATIENCE).expect("an end");
                        return;
                    }
                    if count == self.asked {
                        element.close(session).expect("closed");
                    }
                }
                _ => {}
            }
        }
    }
}

#[test]
fn lines_without_an_answer_go_to_the_next_element_though_the_input_has_ended() {
    let Some((host, socket)) = scene("piped") else {
        return;
    };
    let (told, die) = Numbers::start(&socket, 3, 1);
    let mut session = Session::start(&host, "numbers", LONG);
    session.write("a\nb\nc\n");
    session.finish(&host);
    told.wait("asked");
    // The session has one answer of three, and the state cookie that goes with it.
    assert_eq!(session.line(), "1 a\n");
    die.send(()).expect("an element");
    let (rest, notes, success) = session.end();
    assert_eq!((rest.as_str(), success), ("2 b\n3 c\n", true), "{notes}");
    assert!(
        notes.contains("without an answer are sent again"),
        "{notes}"
    );
    assert!(notes.contains("which has the session's state"), "{notes}");
}

#[test]
fn an_element_dies_before_it_answers_the_only_line() {
    let Some((host, socket)) = scene("only") else {
        return;
    };
    let (told, die) = Numbers::start(&socket, 1, 0);
    let mut session = Session::start(&host, "numbers", LONG);
    session.write("a\n");
    session.finish(&host);
    told.wait("asked");
    die.send(()).expect("an element");
    let (rest, notes, success) = session.end();
    assert_eq!((rest.as_str(), success), ("1 a\n", true), "{notes}");
}
