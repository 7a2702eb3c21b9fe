//! The programs.

use std::borrow::Cow;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;

use super::load::{Load, Tool};
use super::{Program, Scene};
use crate::load::{Dialect, MESSAGE};
use crate::pools::system_program;

/// All programs.
pub const PROGRAMS: &[Program] = &[
    Program {
        name: "redis",
        process: "redis-server",
        processes: 1,
        serve: redis,
        connections: 50,
        load: Load::Tools(&[Tool {
            program: "redis-benchmark",
            package: "redis-tools",
            // redis-benchmark ends at once when a connection breaks or the server reports an error.
            words: &[
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
            end: Signal::SIGTERM,
            judge: no_error,
        }]),
    },
    Program {
        name: "nginx",
        process: "nginx",
        processes: 3,
        serve: nginx,
        connections: 32,
        load: Load::Tools(&[Tool {
            program: "wrk",
            package: "wrk",
            // wrk reconnects by itself, but reports the number of errors.
            words: &[
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
            end: Signal::SIGINT,
            judge: wrk,
        }]),
    },
    Program {
        name: "mosquitto",
        process: "mosquitto",
        processes: 1,
        serve: mosquitto,
        connections: 2,
        load: Load::Tools(&[
            Tool {
                program: "mosquitto_sub",
                package: "mosquitto-clients",
                words: &["-h", "{host}", "-p", "{port}", "-q", "1", "-t", "numbers"],
                end: Signal::SIGTERM,
                judge: numbers,
            },
            Tool {
                program: "bash",
                package: "bash",
                // mosquitto_sub and mosquitto_pub reconnect by themselves: only the kernel's counters show a broken
                // connection.
                words: &[
                    "-c",
                    "exec mosquitto_pub -h {host} -p {port} -q 1 -t numbers -l \
                     < <(i=0; while echo $((++i)); do sleep 0.01; done)",
                ],
                end: Signal::SIGTERM,
                judge: no_error,
            },
        ]),
    },
    Program {
        name: "memcached",
        process: "memcached",
        processes: 1,
        serve: memcached,
        connections: 64,
        load: Load::Ours(MEMCACHED),
    },
    Program {
        name: "asyncio",
        process: "python3",
        processes: 1,
        serve: asyncio,
        connections: 64,
        load: Load::Ours(Dialect::ECHO),
    },
    Program {
        name: "websocket",
        process: "node",
        processes: 1,
        serve: websocket,
        connections: 64,
        load: Load::Ours(WEBSOCKET),
    },
    Program {
        name: "jvm",
        process: "java",
        processes: 1,
        serve: jvm,
        connections: 64,
        load: Load::Ours(Dialect::ECHO),
    },
    Program {
        name: "go",
        process: "http",
        processes: 1,
        serve: go,
        connections: 64,
        load: Load::Ours(HTTP),
    },
];

/// Sets and reads a key of the connection's own.
const MEMCACHED: Dialect = Dialect {
    hello: None,
    ask: |number, message| {
        let (set, get) = (
            format!("set k{number} 0 0 {MESSAGE}\r\n"),
            format!("\r\nget k{number}\r\n"),
        );
        Cow::Owned([set.as_bytes(), message, get.as_bytes()].concat())
    },
    answer: |number, message| {
        let head = format!("STORED\r\nVALUE k{number} 0 {MESSAGE}\r\n");
        Cow::Owned([head.as_bytes(), message, b"\r\nEND\r\n"].concat())
    },
};

/// Sends a binary message of one frame: masked (by zeros) from the client, unmasked from the server.
const WEBSOCKET: Dialect = Dialect {
    hello: Some((
        "GET / HTTP/1.1\r\nHost: lab\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
         Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n",
        "\r\n\r\n",
    )),
    ask: |_, message| Cow::Owned([&[0x82, 0xfe, 1, 0, 0, 0, 0, 0][..], message].concat()),
    answer: |_, message| Cow::Owned([&[0x82, 0x7e, 1, 0][..], message].concat()),
};

const HTTP: Dialect = Dialect {
    hello: None,
    ask: |_, message| {
        let head = format!("POST / HTTP/1.1\r\nHost: lab\r\nContent-Length: {MESSAGE}\r\n\r\n");
        Cow::Owned([head.as_bytes(), message].concat())
    },
    answer: |_, message| {
        let head = format!(
            "HTTP/1.1 200 OK\r\nContent-Length: {MESSAGE}\r\nContent-Type: application/octet-stream\r\n\r\n"
        );
        Cow::Owned([head.as_bytes(), message].concat())
    },
};

fn redis(scene: &Scene) -> Result<Vec<String>> {
    let (host, port) = place(scene);
    let folder = scene.cluster.directory().display().to_string();
    let mut words = command(
        "redis-server",
        "redis-server",
        &["--port", &port, "--bind", &host],
    )?;
    words.extend(["--save", "", "--protected-mode", "no", "--dir", &folder].map(str::to_owned));
    Ok(words)
}

fn nginx(scene: &Scene) -> Result<Vec<String>> {
    let folder = scene.cluster.directory().display().to_string();
    fs::write(
        scene.cluster.directory().join("index.html"),
        "hello\n".repeat(40),
    )?;
    let paths = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"];
    let paths: String = paths
        .iter()
        .map(|name| format!("{name}_temp_path {folder}/{name};\n"))
        .collect();
    let text = format!(
        "daemon off;\nuser root;\nworker_processes 2;\npid {folder}/nginx.pid;\nerror_log stderr;\n\
         events {{}}\nhttp {{\n{paths}access_log off;\nkeepalive_requests 1000000000;\n\
         keepalive_timeout 1h;\nkeepalive_time 24h;\nserver {{ listen {}; root {folder}; }}\n}}\n",
        scene.address
    );
    let file = write(scene, "nginx.conf", &text)?;
    command("nginx", "nginx", &["-e", "stderr", "-c", &file])
}

fn mosquitto(scene: &Scene) -> Result<Vec<String>> {
    let (host, port) = place(scene);
    let text = format!("listener {port} {host}\nallow_anonymous true\nuser root\n");
    let file = write(scene, "mosquitto.conf", &text)?;
    command("mosquitto", "mosquitto", &["-c", &file])
}

fn memcached(scene: &Scene) -> Result<Vec<String>> {
    let (host, port) = place(scene);
    let words = ["-u", "root", "-t", "4", "-l", &host, "-p", &port];
    command("memcached", "memcached", &words)
}

fn asyncio(scene: &Scene) -> Result<Vec<String>> {
    let (host, port) = place(scene);
    let file = write(scene, "echo.py", include_str!("sources/echo.py"))?;
    // Uses the system's interpreter: another one in PATH may be a script that starts it.
    command("/usr/bin/python3", "python3", &[&file, &host, &port])
}

fn websocket(scene: &Scene) -> Result<Vec<String>> {
    let (host, port) = place(scene);
    let file = write(scene, "websocket.js", include_str!("sources/websocket.js"))?;
    let mut words = vec!["NODE_PATH=/usr/share/nodejs".to_owned()];
    words.extend(command("node", "nodejs node-ws", &[&file, &host, &port])?);
    Ok(words)
}

fn jvm(scene: &Scene) -> Result<Vec<String>> {
    let (host, port) = place(scene);
    let folder = scene.cluster.directory().display().to_string();
    let file = write(scene, "Echo.java", include_str!("sources/Echo.java"))?;
    let compiler = system_program("javac", "openjdk-17-jdk-headless")?;
    build(Command::new(compiler).args(["-d", &folder, &file]))?;
    let words = ["-Xmx128m", "-cp", &folder, "Echo", &host, &port];
    command("java", "openjdk-17-jre-headless", &words)
}

fn go(scene: &Scene) -> Result<Vec<String>> {
    let folder = scene.cluster.directory();
    let file = write(scene, "http.go", include_str!("sources/http.go"))?;
    let program = folder.join("http").display().to_string();
    let compiler = system_program("go", "golang-go")?;
    let mut compile = Command::new(compiler);
    compile.args(["build", "-o", &program, &file]);
    // Builds without modules and downloads no other Go version.
    compile.envs([("GO111MODULE", "off"), ("GOTOOLCHAIN", "local")]);
    build(&mut compile)?;
    Ok(vec![program, scene.address.to_string()])
}

/// Returns the program's address and port as text.
fn place(scene: &Scene) -> (String, String) {
    let address = scene.address;
    (address.ip().to_string(), address.port().to_string())
}

fn command(program: &str, package: &str, words: &[&str]) -> Result<Vec<String>> {
    let found = match Path::new(program).is_absolute() {
        true => program.into(),
        false => system_program(program, package)?,
    };
    let words = words.iter().map(|word| (*word).to_owned());
    Ok(std::iter::once(found.display().to_string())
        .chain(words)
        .collect())
}

fn write(scene: &Scene, name: &str, text: &str) -> Result<String> {
    let path = scene.cluster.directory().join(name);
    fs::write(&path, text)?;
    Ok(path.display().to_string())
}

fn build(command: &mut Command) -> Result<()> {
    let output = command.output().context("run a compiler")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?}: {said}");
    Ok(())
}

fn no_error(said: &str) -> Result<String> {
    let error = said.to_lowercase().contains("error");
    ensure!(!error, "it tells of an error");
    Ok("no error".into())
}

/// Reads the output of `wrk`, which has lines for errors only if there were errors.
fn wrk(said: &str) -> Result<String> {
    let errors = ["Socket errors", "Non-2xx"];
    ensure!(
        !errors.iter().any(|error| said.contains(error)),
        "it tells of errors"
    );
    let line = said.lines().find(|line| line.contains(" requests in "));
    Ok(line.context("it tells of no requests")?.trim().to_owned())
}

/// Checks that the output is consecutive numbers, each once.
fn numbers(said: &str) -> Result<String> {
    let numbers: Vec<u64> = said
        .lines()
        .map(|line| line.parse().with_context(|| format!("{line:?}")))
        .collect::<Result<_>>()?;
    let gap = numbers.windows(2).find(|pair| pair[1] != pair[0] + 1);
    ensure!(gap.is_none(), "{gap:?} after each other");
    ensure!(!numbers.is_empty(), "no message came");
    Ok(format!("{} messages in order", numbers.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_tools_tell_is_understood() {
        assert!(wrk("  5 requests in 1.00s, 1KB read\n").is_ok());
        assert!(
            wrk("  5 requests in 1.00s, 1KB read\n  Socket errors: connect 0, read 1\n").is_err()
        );
        assert!(wrk("").is_err());
        assert!(numbers("3\n4\n5\n").is_ok());
        assert!(numbers("3\n5\n").is_err());
        assert!(numbers("3\n3\n").is_err());
        assert!(no_error("Error from server: x").is_err());
    }
}
