//! A server that echoes, in a process of its own, and its clients.

use rustix::event::epoll;
use std::collections::HashMap;
use std::error::Error;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;

/// Where it listens.
pub const ADDRESS: SocketAddr =
    SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::new(10, 77, 9, 9), 8080));
const MESSAGE: usize = 256;

pub struct Server {
    child: Mutex<Child>,
    pid: i32,
    clients: Vec<TcpStream>,
}

impl Server {
    /// With this many clients, each of which has had an answer.
    pub fn start(clients: usize) -> Result<Self, Box<dyn Error>> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg("serve")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let mut ready = [0];
        child
            .stdout
            .as_mut()
            .ok_or("no output")?
            .read_exact(&mut ready)?;
        let connect = |_| TcpStream::connect(ADDRESS);
        let server = Self {
            pid: child.id() as i32,
            child: Mutex::new(child),
            clients: (0..clients).map(connect).collect::<Result<_, _>>()?,
        };
        server.exchange(100)?;
        Ok(server)
    }

    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// This share of the clients says something and gets its answer.
    pub fn exchange(&self, percent: usize) -> Result<(), Box<dyn Error>> {
        let some = self.clients.len() * percent / 100;
        for mut client in &self.clients[..some] {
            client.write_all(&[7; MESSAGE])?;
        }
        for mut client in &self.clients[..some] {
            client.read_exact(&mut [0; MESSAGE])?;
        }
        Ok(())
    }

    pub fn stop(&self) -> Result<(), Box<dyn Error>> {
        self.signal(rustix::process::Signal::STOP)?;
        while !self.status()?.contains("State:\tT") {
            std::thread::sleep(Duration::from_micros(100));
        }
        Ok(())
    }

    pub fn go_on(&self) -> Result<(), Box<dyn Error>> {
        self.signal(rustix::process::Signal::CONT)
    }

    fn status(&self) -> std::io::Result<String> {
        std::fs::read_to_string(format!("/proc/{}/status", self.pid))
    }

    fn signal(&self, signal: rustix::process::Signal) -> Result<(), Box<dyn Error>> {
        let pid = rustix::process::Pid::from_raw(self.pid).ok_or("no process")?;
        Ok(rustix::process::kill_process(pid, signal)?)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Ok(mut child) = self.child.lock() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The server's life.
pub fn serve() -> Result<(), Box<dyn Error>> {
    let listener = TcpListener::bind(ADDRESS)?;
    let set = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    let mut connections: HashMap<u64, TcpStream> = HashMap::new();
    let add = |fd: std::os::fd::BorrowedFd<'_>| {
        let data = epoll::EventData::new_u64(fd.as_raw_fd() as u64);
        epoll::add(&set, fd, data, epoll::EventFlags::IN)
    };
    add(listener.as_fd())?;
    // Output is closed when it has said that it listens: its reader stays behind.
    std::io::stdout().write_all(b"!")?;
    std::io::stdout().flush()?;
    rustix::stdio::dup2_stdout(std::fs::File::open("/dev/null")?)?;
    let mut events = Vec::with_capacity(512);
    let mut message = [0; 4096];
    loop {
        events.clear();
        match epoll::wait(&set, rustix::buffer::spare_capacity(&mut events), None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        for event in &events {
            let number = event.data.u64();
            if number == listener.as_raw_fd() as u64 {
                let (connection, _) = listener.accept()?;
                add(connection.as_fd())?;
                connections.insert(connection.as_raw_fd() as u64, connection);
            } else if let Some(mut connection) = connections.get(&number) {
                match connection.read(&mut message)? {
                    0 => drop(connections.remove(&number)),
                    length => connection.write_all(&message[..length])?,
                }
            }
        }
    }
}
