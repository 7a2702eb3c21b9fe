//! The servers: stock programs, each run as its documentation says.

use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::speech::{Conversation, Speech};
use super::{BEHIND, CLIENTS, PORT, PORT_BEHIND};
use crate::cluster::Family;
use crate::moves::Group;
use crate::pools::system_program;

/// A server and its protocol.
#[derive(Debug)]
pub struct Program {
    /// Name of the program.
    pub name: &'static str,
    speech: Speech,
    /// Creates the server's files and returns the words of its command.
    serve: fn(&Site<'_>) -> Result<Vec<String>>,
}

/// All programs.
pub const PROGRAMS: &[Program] = &[
    Program {
        name: "nginx",
        speech: Speech::Http,
        serve: |site| nginx(site, 1, "return 200 $request_uri;"),
    },
    Program {
        name: "nginx-4",
        speech: Speech::Http,
        serve: |site| nginx(site, 4, "return 200 $request_uri;"),
    },
    Program {
        name: "haproxy",
        speech: Speech::Http,
        serve: haproxy,
    },
    Program {
        name: "postgresql",
        speech: Speech::Postgresql,
        serve: postgresql,
    },
    Program {
        name: "php-fpm",
        speech: Speech::Http,
        serve: php_fpm,
    },
    Program {
        name: "jvm",
        speech: Speech::Echo,
        serve: jvm,
    },
    Program {
        name: "go",
        speech: Speech::Http,
        serve: go,
    },
];

/// Returns the program with this name.
///
/// # Errors
/// There is no such program.
pub fn program(name: &str) -> Result<&'static Program> {
    let found = PROGRAMS.iter().find(|program| program.name == name);
    found.with_context(|| {
        let names: Vec<_> = PROGRAMS.iter().map(|program| program.name).collect();
        format!("no program {name}: there are {}", names.join(", "))
    })
}

/// Folder and addresses of a server.
struct Site<'a> {
    folder: &'a Path,
    address: SocketAddr,
    /// Address of the backend that the server connects to.
    behind: SocketAddr,
}

/// A running server.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    speech: Speech,
    /// First process of the server.
    pub pid: i32,
}

impl Server {
    /// Starts a server at the first of [`HOMES`](crate::moves::HOMES), and waits until the server answers.
    ///
    /// # Errors
    /// The server is not installed, or does not start.
    pub fn start(program: &'static Program, group: &Group, folder: &Path) -> Result<Self> {
        // Some servers change to another user, which must be able to read the folder.
        fs::set_permissions(folder, Permissions::from_mode(0o755))?;
        let lab = group.cluster().lab();
        let (behind, _) = lab.address(BEHIND)?;
        let site = Site {
            folder,
            address: SocketAddr::new(group.cluster().service_address(Family::V4), PORT),
            behind: SocketAddr::new(behind.into(), PORT_BEHIND),
        };
        let listener = lab.in_net(BEHIND, || TcpListener::bind(site.behind))??;
        std::thread::spawn(move || answer_all(&listener));
        let words = (program.serve)(&site)?;
        let pid = group.with_output(group.start(folder, &words), folder)?;
        let server = Self {
            address: site.address,
            speech: program.speech,
            pid,
        };
        let ask = || {
            let open = || Conversation::open(server.address, server.speech, Duration::from_secs(5));
            let mut open = lab.in_net(CLIENTS, open).ok()?.ok()?;
            let wrong = open.exchange(0, 0).ok()?;
            open.close().ok()?;
            (wrong.0 == 0).then_some(())
        };
        group.with_output(group.until("the server answers", ask), folder)?;
        Ok(server)
    }

    /// Returns the server's address and protocol.
    pub fn spoken(&self) -> (SocketAddr, Speech) {
        (self.address, self.speech)
    }
}

/// Serves as the backend of a proxy: answers each request with the requested path. Ends with the benchmark.
fn answer_all(listener: &TcpListener) {
    for stream in listener.incoming().flatten() {
        std::thread::spawn(move || answer(&stream));
    }
}

fn answer(stream: &TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut lines = BufReader::new(stream).lines();
    loop {
        let Some(first) = lines.next().transpose()? else {
            return Ok(());
        };
        while lines
            .next()
            .transpose()?
            .is_some_and(|line| !line.is_empty())
        {}
        let path = first.split(' ').nth(1).unwrap_or_default();
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", path.len());
        let mut to: &TcpStream = stream;
        to.write_all([head.as_bytes(), path.as_bytes()].concat().as_slice())?;
    }
}

fn nginx(site: &Site<'_>, workers: usize, location: &str) -> Result<Vec<String>> {
    let program = system_program("nginx", "nginx")?.display().to_string();
    let folder = site.folder.display();
    let names = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"];
    let paths: String = names
        .iter()
        .map(|name| format!("{name}_temp_path {folder}/{name};\n"))
        .collect();
    let text = format!(
        "daemon off;\nuser root;\nworker_processes {workers};\npid {folder}/nginx.pid;\n\
         error_log {folder}/nginx.log;\nevents {{ worker_connections 1024; }}\nhttp {{\n{paths}access_log off;\n\
         keepalive_requests 1000000000;\nkeepalive_timeout 1h;\nkeepalive_time 24h;\n\
         server {{ listen {}; location / {{ {location} }} }}\n}}\n",
        site.address
    );
    let file = site.write("nginx.conf", &text)?;
    Ok([&program, "-e", "stderr", "-c", &file]
        .map(str::to_owned)
        .into())
}

fn haproxy(site: &Site<'_>) -> Result<Vec<String>> {
    let program = system_program("haproxy", "haproxy")?.display().to_string();
    let text = format!(
        "global\n    maxconn 2000\ndefaults\n    mode http\n    timeout connect 10s\n    timeout client 1h\n    \
         timeout server 30s\n    timeout http-keep-alive 1h\nfrontend front\n    bind {}\n    default_backend back\n\
         backend back\n    server one {}\n",
        site.address, site.behind
    );
    let file = site.write("haproxy.cfg", &text)?;
    Ok([&program, "-Ws", "-f", &file].map(str::to_owned).into())
}

fn postgresql(site: &Site<'_>) -> Result<Vec<String>> {
    let bin = newest("/usr/lib/postgresql").context("no PostgreSQL: apt-get install postgresql")?;
    let data = site.folder.join("data").display().to_string();
    let by = [
        "setpriv",
        "--reuid=postgres",
        "--regid=postgres",
        "--clear-groups",
    ];
    fs::create_dir(&data)?;
    let owner = Command::new("chown")
        .args(["postgres:postgres", &data])
        .status()?;
    ensure!(owner.success(), "there is no user postgres");
    let mut make = Command::new(by[0]);
    make.args(&by[1..]).arg(format!("{bin}/bin/initdb"));
    make.args(["-D", &data, "-U", "postgres", "-A", "trust", "--no-sync"]);
    make.current_dir(&data);
    build(&mut make)?;
    let mut rules = fs::OpenOptions::new()
        .append(true)
        .open(format!("{data}/pg_hba.conf"))?;
    rules.write_all(b"host all all all trust\n")?;
    let mut words: Vec<String> = by.map(str::to_owned).into();
    words.extend([format!("{bin}/bin/postgres"), "-D".into(), data]);
    let options = [
        format!("listen_addresses={}", site.address.ip()),
        format!("port={}", site.address.port()),
        "unix_socket_directories=".into(),
        "max_connections=200".into(),
        "fsync=off".into(),
    ];
    words.extend(options.into_iter().flat_map(|option| ["-c".into(), option]));
    Ok(words)
}

/// The FastCGI server is a child of the HTTP server, so that both are in one process tree.
fn php_fpm(site: &Site<'_>) -> Result<Vec<String>> {
    let folder = site.folder.display();
    let versions = fs::read_dir("/etc/php").into_iter().flatten().flatten();
    let version = versions
        .filter_map(|entry| entry.file_name().into_string().ok())
        .max();
    let version = version.context("no PHP: apt-get install php-fpm")?;
    let fpm = system_program(&format!("php-fpm{version}"), "php-fpm")?;
    site.write(
        "index.php",
        "<?php $path = $_SERVER['REQUEST_URI']; header('Content-Length: ' . strlen($path)); echo $path;\n",
    )?;
    let text = format!(
        "[global]\ndaemonize = no\nerror_log = {folder}/fpm.log\n[www]\nuser = www-data\ngroup = www-data\n\
         listen = {folder}/fpm.sock\nlisten.mode = 0666\npm = dynamic\npm.max_children = 8\npm.start_servers = 2\n\
         pm.min_spare_servers = 1\npm.max_spare_servers = 3\n"
    );
    let file = site.write("fpm.conf", &text)?;
    let location = format!(
        "fastcgi_pass unix:{folder}/fpm.sock; fastcgi_param SCRIPT_FILENAME {folder}/index.php; \
         fastcgi_param REQUEST_URI $request_uri; fastcgi_param REQUEST_METHOD $request_method;"
    );
    let nginx = nginx(site, 1, &location)?;
    let both = format!("{} -y {file} -F & exec \"$@\"", fpm.display());
    let mut words: Vec<String> = ["sh", "-c", &both, "sh"].map(str::to_owned).into();
    words.extend(nginx);
    Ok(words)
}

fn jvm(site: &Site<'_>) -> Result<Vec<String>> {
    let folder = site.folder.display().to_string();
    let file = site.write("Echo.java", include_str!("../programs/sources/Echo.java"))?;
    let compiler = system_program("javac", "openjdk-17-jdk-headless")?;
    build(Command::new(compiler).args(["-d", &folder, &file]))?;
    let program = system_program("java", "openjdk-17-jre-headless")?
        .display()
        .to_string();
    let (host, port) = (
        site.address.ip().to_string(),
        site.address.port().to_string(),
    );
    let words = [&program, "-Xmx128m", "-cp", &folder, "Echo", &host, &port];
    Ok(words.map(str::to_owned).into())
}

fn go(site: &Site<'_>) -> Result<Vec<String>> {
    let file = site.write("http.go", include_str!("../programs/sources/http.go"))?;
    let program = site.folder.join("http").display().to_string();
    let mut compile = Command::new(system_program("go", "golang-go")?);
    compile.args(["build", "-o", &program, &file]);
    // Builds without modules and downloads no other Go version.
    compile.envs([("GO111MODULE", "off"), ("GOTOOLCHAIN", "local")]);
    build(&mut compile)?;
    Ok(vec![program, site.address.to_string()])
}

impl Site<'_> {
    fn write(&self, name: &str, text: &str) -> Result<String> {
        let path = self.folder.join(name);
        fs::write(&path, text)?;
        Ok(path.display().to_string())
    }
}

/// Returns the ids of the users that the servers run as, if these users exist.
pub(super) fn users() -> Vec<i64> {
    let names = ["root", "www-data", "postgres"];
    let known = fs::read_to_string("/etc/passwd").unwrap_or_default();
    let numbers = known.lines().filter_map(|line| {
        let mut words = line.split(':');
        let name = words.next()?;
        let number = words.nth(1)?.parse().ok()?;
        names.contains(&name).then_some(number)
    });
    numbers.collect()
}

/// Returns the entry of a folder with the highest name.
fn newest(folder: &str) -> Option<String> {
    let entries = fs::read_dir(folder).ok()?.flatten();
    let paths = entries.map(|entry| entry.path().display().to_string());
    paths.max()
}

fn build(command: &mut Command) -> Result<()> {
    let output = command
        .output()
        .context("run a program that makes something")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?}: {said}");
    Ok(())
}
