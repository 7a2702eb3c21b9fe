//! Table of the unmodified programs that can be moved under load.

use std::borrow::Cow;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;

use super::program_load::{LoadTool, ProgramLoad};
use super::{ECHO_JAVA, HTTP_GO, ProgramSetup, UnmodifiedProgram};
use crate::connection_load::{MESSAGE_BYTES, RequestProtocol};
use crate::process_lab::find_system_program;

/// All unmodified programs of the table.
pub const PROGRAMS: &[UnmodifiedProgram] = &[
    UnmodifiedProgram {
        name: "redis",
        process: "redis-server",
        processes: 1,
        prepare: redis_command,
        connections: 50,
        load: ProgramLoad::Tools(&[LoadTool {
            program: "redis-benchmark",
            package: "redis-tools",
            // redis-benchmark ends at once when a connection breaks or the server reports an error.
            arguments: &[
                "-h",
                "{host}",
                "-p",
                "{port}",
                "-k",
                "1",
                "-c",
                "50",
                "-n",
                "2000000000",
                "-r",
                "10000",
                "-d",
                "256",
                "-t",
                "set",
            ],
            end_signal: Signal::SIGTERM,
            check_output: check_no_error,
        }]),
    },
    UnmodifiedProgram {
        name: "nginx",
        process: "nginx",
        processes: 3,
        prepare: nginx_command,
        connections: 32,
        load: ProgramLoad::Tools(&[LoadTool {
            program: "wrk",
            package: "wrk",
            // wrk reconnects by itself, but reports the number of errors.
            arguments: &[
                "-t",
                "2",
                "-c",
                "32",
                "-d",
                "1h",
                "--timeout",
                "30s",
                "http://{host}:{port}/",
            ],
            end_signal: Signal::SIGINT,
            check_output: check_wrk,
        }]),
    },
    UnmodifiedProgram {
        name: "mosquitto",
        process: "mosquitto",
        processes: 1,
        prepare: mosquitto_command,
        connections: 2,
        load: ProgramLoad::Tools(&[
            LoadTool {
                program: "mosquitto_sub",
                package: "mosquitto-clients",
                arguments: &["-h", "{host}", "-p", "{port}", "-q", "1", "-t", "numbers"],
                end_signal: Signal::SIGTERM,
                check_output: check_consecutive_numbers,
            },
            LoadTool {
                program: "bash",
                package: "bash",
                // mosquitto_sub and mosquitto_pub reconnect by themselves: only the kernel's counters show a broken
                // connection.
                arguments: &[
                    "-c",
                    "exec mosquitto_pub -h {host} -p {port} -q 1 -t numbers -l \
                     < <(i=0; while echo $((++i)); do sleep 0.01; done)",
                ],
                end_signal: Signal::SIGTERM,
                check_output: check_no_error,
            },
        ]),
    },
    UnmodifiedProgram {
        name: "memcached",
        process: "memcached",
        processes: 1,
        prepare: memcached_command,
        connections: 64,
        load: ProgramLoad::Connections(MEMCACHED_PROTOCOL),
    },
    UnmodifiedProgram {
        name: "asyncio",
        process: "python3",
        processes: 1,
        prepare: asyncio_command,
        connections: 64,
        load: ProgramLoad::Connections(RequestProtocol::ECHO),
    },
    UnmodifiedProgram {
        name: "websocket",
        process: "node",
        processes: 1,
        prepare: websocket_command,
        connections: 64,
        load: ProgramLoad::Connections(WEBSOCKET_PROTOCOL),
    },
    UnmodifiedProgram {
        name: "jvm",
        process: "java",
        processes: 1,
        prepare: jvm_command,
        connections: 64,
        load: ProgramLoad::Connections(RequestProtocol::ECHO),
    },
    UnmodifiedProgram {
        name: "go",
        process: "http",
        processes: 1,
        prepare: go_command,
        connections: 64,
        load: ProgramLoad::Connections(HTTP_PROTOCOL),
    },
];

/// Sets and reads a key of the connection's own.
pub const REDIS_PROTOCOL: RequestProtocol = RequestProtocol {
    greeting: None,
    make_request: |number, message| {
        let key = format!("k{number}");
        let (set, get) = (
            format!(
                "*3\r\n$3\r\nSET\r\n${}\r\n{key}\r\n${MESSAGE_BYTES}\r\n",
                key.len()
            ),
            format!("\r\n*2\r\n$3\r\nGET\r\n${}\r\n{key}\r\n", key.len()),
        );
        Cow::Owned([set.as_bytes(), message, get.as_bytes()].concat())
    },
    expected_answer: |_, message| {
        let head = format!("+OK\r\n${MESSAGE_BYTES}\r\n");
        Cow::Owned([head.as_bytes(), message, b"\r\n"].concat())
    },
    any_byte: None,
};

/// Sets and reads a key of the connection's own.
pub const MEMCACHED_PROTOCOL: RequestProtocol = RequestProtocol {
    greeting: None,
    make_request: |number, message| {
        let (set, get) = (
            format!("set k{number} 0 0 {MESSAGE_BYTES}\r\n"),
            format!("\r\nget k{number}\r\n"),
        );
        Cow::Owned([set.as_bytes(), message, get.as_bytes()].concat())
    },
    expected_answer: |number, message| {
        let head = format!("STORED\r\nVALUE k{number} 0 {MESSAGE_BYTES}\r\n");
        Cow::Owned([head.as_bytes(), message, b"\r\nEND\r\n"].concat())
    },
    any_byte: None,
};

/// Lines of the file that nginx serves: `hello`.
const NGINX_LINES: usize = 40;

/// Gets the file that nginx serves. NUL bytes stand for the date, and for the time of the file in its last modification
/// and entity tag.
pub const NGINX_PROTOCOL: RequestProtocol = RequestProtocol {
    greeting: None,
    make_request: |_, _| Cow::Borrowed(b"GET /index.html HTTP/1.1\r\nHost: lab\r\n\r\n"),
    expected_answer: |_, _| {
        let body = nginx_file();
        let (date, time, bytes) = ("\0".repeat(29), "\0".repeat(8), body.len());
        Cow::Owned(
            format!(
                "HTTP/1.1 200 OK\r\nServer: nginx\r\nDate: {date}\r\nContent-Type: text/html\r\n\
                 Content-Length: {bytes}\r\nLast-Modified: {date}\r\nConnection: keep-alive\r\n\
                 ETag: \"{time}-{bytes:x}\"\r\nAccept-Ranges: bytes\r\n\r\n{body}"
            )
            .into_bytes(),
        )
    },
    any_byte: Some(0),
};

fn nginx_file() -> String {
    "hello\n".repeat(NGINX_LINES)
}

/// Sends a binary message of one frame: masked (by zeros) from the client, unmasked from the server.
pub const WEBSOCKET_PROTOCOL: RequestProtocol = RequestProtocol {
    greeting: Some((
        "GET / HTTP/1.1\r\nHost: lab\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
         Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n",
        "\r\n\r\n",
    )),
    make_request: |_, message| Cow::Owned([&[0x82, 0xfe, 1, 0, 0, 0, 0, 0][..], message].concat()),
    expected_answer: |_, message| Cow::Owned([&[0x82, 0x7e, 1, 0][..], message].concat()),
    any_byte: None,
};

const HTTP_PROTOCOL: RequestProtocol = RequestProtocol {
    greeting: None,
    make_request: |_, message| {
        let head =
            format!("POST / HTTP/1.1\r\nHost: lab\r\nContent-Length: {MESSAGE_BYTES}\r\n\r\n");
        Cow::Owned([head.as_bytes(), message].concat())
    },
    expected_answer: |_, message| {
        let head = format!(
            "HTTP/1.1 200 OK\r\nContent-Length: {MESSAGE_BYTES}\r\nContent-Type: application/octet-stream\r\n\r\n"
        );
        Cow::Owned([head.as_bytes(), message].concat())
    },
    any_byte: None,
};

fn redis_command(setup: &ProgramSetup<'_>) -> Result<Vec<String>> {
    let (host, port) = address_and_port(setup);
    let folder = setup.folder.display().to_string();
    let mut words = program_command(
        "redis-server",
        "redis-server",
        &["--port", &port, "--bind", &host],
    )?;
    words.extend(["--save", "", "--protected-mode", "no", "--dir", &folder].map(str::to_owned));
    Ok(words)
}

fn nginx_command(setup: &ProgramSetup<'_>) -> Result<Vec<String>> {
    let folder = setup.folder.display().to_string();
    fs::write(setup.folder.join("index.html"), nginx_file())?;
    let paths = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"];
    let paths: String = paths
        .iter()
        .map(|name| format!("{name}_temp_path {folder}/{name};\n"))
        .collect();
    let text = format!(
        "daemon off;\nuser root;\nworker_processes 2;\npid {folder}/nginx.pid;\nerror_log stderr;\n\
         events {{}}\nhttp {{\n{paths}access_log off;\nserver_tokens off;\nkeepalive_requests 1000000000;\n\
         keepalive_timeout 1h;\nkeepalive_time 24h;\nserver {{ listen {}; root {folder}; }}\n}}\n",
        setup.address
    );
    let file = write_file(setup, "nginx.conf", &text)?;
    program_command("nginx", "nginx", &["-e", "stderr", "-c", &file])
}

fn mosquitto_command(setup: &ProgramSetup<'_>) -> Result<Vec<String>> {
    let (host, port) = address_and_port(setup);
    let text = format!("listener {port} {host}\nallow_anonymous true\nuser root\n");
    let file = write_file(setup, "mosquitto.conf", &text)?;
    program_command("mosquitto", "mosquitto", &["-c", &file])
}

fn memcached_command(setup: &ProgramSetup<'_>) -> Result<Vec<String>> {
    let (host, port) = address_and_port(setup);
    let words = ["-u", "root", "-t", "4", "-l", &host, "-p", &port];
    program_command("memcached", "memcached", &words)
}

fn asyncio_command(setup: &ProgramSetup<'_>) -> Result<Vec<String>> {
    let (host, port) = address_and_port(setup);
    let file = write_file(setup, "echo.py", include_str!("sources/echo.py"))?;
    // Uses the system's interpreter: another one in PATH may be a script that starts it.
    program_command("/usr/bin/python3", "python3", &[&file, &host, &port])
}

fn websocket_command(setup: &ProgramSetup<'_>) -> Result<Vec<String>> {
    let (host, port) = address_and_port(setup);
    let file = write_file(setup, "websocket.js", include_str!("sources/websocket.js"))?;
    let mut words = vec!["NODE_PATH=/usr/share/nodejs".to_owned()];
    words.extend(program_command(
        "node",
        "nodejs node-ws",
        &[&file, &host, &port],
    )?);
    Ok(words)
}

fn jvm_command(setup: &ProgramSetup<'_>) -> Result<Vec<String>> {
    let (host, port) = address_and_port(setup);
    let folder = setup.folder.display().to_string();
    let file = write_file(setup, "Echo.java", ECHO_JAVA)?;
    let compiler = find_system_program("javac", "openjdk-17-jdk-headless")?;
    run_build(Command::new(compiler).args(["-d", &folder, &file]))?;
    let words = ["-Xmx128m", "-cp", &folder, "Echo", &host, &port];
    program_command("java", "openjdk-17-jre-headless", &words)
}

fn go_command(setup: &ProgramSetup<'_>) -> Result<Vec<String>> {
    let folder = setup.folder;
    let file = write_file(setup, "http.go", HTTP_GO)?;
    let program = folder.join("http").display().to_string();
    let compiler = find_system_program("go", "golang-go")?;
    let mut compile = Command::new(compiler);
    compile.args(["build", "-o", &program, &file]);
    // Builds without modules and downloads no other Go version.
    compile.envs([("GO111MODULE", "off"), ("GOTOOLCHAIN", "local")]);
    run_build(&mut compile)?;
    Ok(vec![program, setup.address.to_string()])
}

/// Returns the program's address and port as text.
fn address_and_port(setup: &ProgramSetup<'_>) -> (String, String) {
    let address = setup.address;
    (address.ip().to_string(), address.port().to_string())
}

fn program_command(program: &str, package: &str, words: &[&str]) -> Result<Vec<String>> {
    let found = match Path::new(program).is_absolute() {
        true => program.into(),
        false => find_system_program(program, package)?,
    };
    let words = words.iter().map(|word| (*word).to_owned());
    Ok(std::iter::once(found.display().to_string())
        .chain(words)
        .collect())
}

fn write_file(setup: &ProgramSetup<'_>, name: &str, text: &str) -> Result<String> {
    let path = setup.folder.join(name);
    fs::write(&path, text)?;
    Ok(path.display().to_string())
}

fn run_build(command: &mut Command) -> Result<()> {
    let output = command.output().context("run a compiler")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?}: {said}");
    Ok(())
}

fn check_no_error(said: &str) -> Result<String> {
    let has_error = said.to_lowercase().contains("error");
    ensure!(!has_error, "the output contains an error");
    Ok("no error".into())
}

/// Reads the output of `wrk`, which has lines for errors only if there were errors.
fn check_wrk(said: &str) -> Result<String> {
    let errors = ["Socket errors", "Non-2xx"];
    ensure!(
        !errors.iter().any(|error| said.contains(error)),
        "the output contains errors"
    );
    let line = said.lines().find(|line| line.contains(" requests in "));
    Ok(line
        .context("the output has no number of requests")?
        .trim()
        .to_owned())
}

/// Checks that the output is consecutive numbers, each once.
fn check_consecutive_numbers(said: &str) -> Result<String> {
    let numbers: Vec<u64> = said
        .lines()
        .map(|line| line.parse().with_context(|| format!("{line:?}")))
        .collect::<Result<_>>()?;
    let gap = numbers.windows(2).find(|pair| pair[1] != pair[0] + 1);
    ensure!(gap.is_none(), "the messages {gap:?} are not consecutive");
    ensure!(!numbers.is_empty(), "no message was received");
    Ok(format!("{} messages in order", numbers.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_of_tools_is_parsed() {
        assert!(check_wrk("  5 requests in 1.00s, 1KB read\n").is_ok());
        assert!(
            check_wrk("  5 requests in 1.00s, 1KB read\n  Socket errors: connect 0, read 1\n")
                .is_err()
        );
        assert!(check_wrk("").is_err());
        assert!(check_consecutive_numbers("3\n4\n5\n").is_ok());
        assert!(check_consecutive_numbers("3\n5\n").is_err());
        assert!(check_consecutive_numbers("3\n3\n").is_err());
        assert!(check_no_error("Error from server: x").is_err());
    }
}
