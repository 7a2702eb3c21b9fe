import java.io.IOException;
import java.net.InetAddress;
import java.net.ServerSocket;
import java.net.Socket;
import java.util.concurrent.Executors;

/** A server with a thread for each connection that sends back what comes: Echo ADDRESS PORT */
public class Echo {
    public static void main(String[] words) throws IOException {
        var address = InetAddress.getByName(words[0]);
        var threads = Executors.newCachedThreadPool();
        try (var listener = new ServerSocket(Integer.parseInt(words[1]), 1024, address)) {
            while (true) {
                var socket = listener.accept();
                threads.submit(() -> serve(socket));
            }
        }
    }

    private static void serve(Socket socket) {
        try (socket) {
            socket.setTcpNoDelay(true);
            socket.getInputStream().transferTo(socket.getOutputStream());
        } catch (IOException gone) {
            // The client has ended.
        }
    }
}
