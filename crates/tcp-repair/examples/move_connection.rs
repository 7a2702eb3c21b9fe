//! Moves a TCP connection to another process: a server reads the first half of a text from a client, and another process,
//! started only then, reads the second half over the same connection and answers. The client notices nothing.
//!
//! `cargo run -p holdfast-tcp-repair --example move_connection` (root: repair mode needs `CAP_NET_ADMIN`)

use holdfast_tcp_repair::{
    TcpDynamicState, TcpStaticState, WindowProbe, abandon, activate, extract, prepare, read_static,
    restore, set_deferred_options_and_timeout,
};
use std::error::Error;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::process::{Command, Stdio};

const FIRST_HALF: &str = "The first half went to process ";
const SECOND_HALF: &str = ", the second half to another";

fn main() -> Result<(), Box<dyn Error>> {
    match std::env::args().nth(1).as_deref() {
        None => run_donor(),
        Some("accept") => run_acceptor(),
        Some(other) => Err(format!("unknown argument {other}").into()),
    }
}

/// Serves the first half, and gives the connection away.
fn run_donor() -> Result<(), Box<dyn Error>> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut client = TcpStream::connect(listener.local_addr()?)?;
    let (mut server, _) = listener.accept()?;
    drop(listener);
    client.write_all(FIRST_HALF.as_bytes())?;
    let mut first = vec![0; FIRST_HALF.len()];
    server.read_exact(&mut first)?;
    println!(
        "process {}: received {:?}",
        std::process::id(),
        to_text(&first)
    );

    let static_state = read_static(server.as_fd())?;
    // From here on, packets of the connection must not reach this socket. This client sends nothing meanwhile; in
    // general a packet filter keeps them back.
    let dynamic_state = extract(server.as_fd(), &static_state)?;
    // Two sockets of one host cannot have the same connection, so this one is closed first, without a FIN.
    abandon(server.as_fd())?;
    drop(server);

    let mut acceptor = Command::new(std::env::current_exe()?)
        .arg("accept")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let state = postcard::to_stdvec(&(static_state, dynamic_state))?;
    println!(
        "process {}: gives the connection away, {} bytes",
        std::process::id(),
        state.len()
    );
    acceptor.stdin.take().ok_or("no pipe")?.write_all(&state)?;
    let mut lines = BufReader::new(acceptor.stdout.take().ok_or("no pipe")?).lines();
    println!("{}", lines.next().ok_or("the acceptor failed")??);

    client.write_all(SECOND_HALF.as_bytes())?;
    let mut answer = String::new();
    client.read_to_string(&mut answer)?;
    for line in lines {
        println!("{}", line?);
    }
    println!("client: received {answer:?}");
    let ended = acceptor.wait()?;
    let expected = format!("answer to {SECOND_HALF:?}");
    if ended.success() && answer == expected {
        Ok(())
    } else {
        Err(format!("expected {expected:?}; the acceptor ended with {ended}").into())
    }
}

/// Takes the connection over from standard input, and answers the second half.
fn run_acceptor() -> Result<(), Box<dyn Error>> {
    let mut bytes = Vec::new();
    std::io::stdin().read_to_end(&mut bytes)?;
    let (static_state, dynamic_state): (TcpStaticState, TcpDynamicState) =
        postcard::from_bytes(&bytes)?;
    let prepared = prepare(&static_state)?;
    let restored = restore(prepared, &static_state, &dynamic_state)?;
    let socket = activate(restored, &static_state, &dynamic_state, WindowProbe::Always)?;
    set_deferred_options_and_timeout(socket.as_fd(), &static_state)?;
    println!("process {}: has the connection", std::process::id());

    let mut server = TcpStream::from(socket);
    let mut second = vec![0; SECOND_HALF.len()];
    server.read_exact(&mut second)?;
    println!(
        "process {}: received {:?}",
        std::process::id(),
        to_text(&second)
    );
    write!(server, "answer to {:?}", to_text(&second))?;
    Ok(())
}

fn to_text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
