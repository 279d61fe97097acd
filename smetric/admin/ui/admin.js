// Asks the admin port, with the token where it wants one. What is asked and shown is in the other files.

const KEY = "smetric.admin.token";

let asking = null;

/** GET `path`; asks for the token while the answer is 401. Throws an Error with the router's own words. */
export async function get(path, signal) {
  for (;;) {
    const token = sessionStorage.getItem(KEY);
    const headers = token ? { authorization: `Bearer ${token}` } : {};
    const answer = await fetch(path, { headers, signal, cache: "no-store", credentials: "omit" });
    if (answer.status !== 401) {
      if (!answer.ok) throw new Refused(answer.status, await reason(answer));
      return answer;
    }
    if (sessionStorage.getItem(KEY) === token) await askForToken(token !== null);
  }
}

/** An answer other than 2xx. */
class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function reason(answer) {
  try {
    return (await answer.json()).error || `status ${answer.status}`;
  } catch {
    return `status ${answer.status}`;
  }
}

/** One dialog, however many requests wait for it. */
function askForToken(wasWrong) {
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("token");
    const text = document.getElementById("token-text");
    if (wasWrong) document.getElementById("token-why").textContent = "That was not the token. It is the setting admin.token.";
    text.value = "";
    dialog.oncancel = (event) => event.preventDefault();
    document.getElementById("token-form").onsubmit = () => {
      sessionStorage.setItem(KEY, text.value.trim());
      asking = null;
      resolve();
    };
    dialog.showModal();
  });
  return asking;
}
